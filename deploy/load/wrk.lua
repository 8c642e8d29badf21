-- Completions, one after another on each connection, for a server of `python -m experiments.serve`:
--   wrk -t 1 -c 8 -d 30s --latency -s deploy/load/wrk.lua http://127.0.0.1:8000/v1/completions
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.body = '{"model": "' .. (os.getenv("MODEL") or "tiny")
  .. '", "prompt": "The function returns", "max_tokens": 32, "ignore_eos": true}'

local failed = 0
function response(status)
  if status ~= 200 then
    failed = failed + 1
    if failed == 1 then print("status " .. status) end
  end
end
