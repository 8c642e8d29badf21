// Requests at a steady rate for a server of `python -m experiments.serve`.
//   k6 run -e URL=http://127.0.0.1:8000 -e MODEL=tiny -e RATE=16 deploy/load/k6.js
import { check } from 'k6';
import http from 'k6/http';

export const options = {
  scenarios: {
    steady: {
      executor: 'constant-arrival-rate',
      rate: Number(__ENV.RATE || 16),
      timeUnit: '1s',
      duration: __ENV.DURATION || '30s',
      preAllocatedVUs: 64,
    },
  },
  thresholds: { checks: ['rate>0.99'] },
};

const body = JSON.stringify({
  model: __ENV.MODEL || 'tiny',
  prompt: 'The function returns',
  max_tokens: 32,
  ignore_eos: true,
});

export default function () {
  const url = `${__ENV.URL || 'http://127.0.0.1:8000'}/v1/completions`;
  const answer = http.post(url, body, { headers: { 'Content-Type': 'application/json' } });
  check(answer, { 'has 32 tokens': (r) => r.status === 200 && r.json('usage.completion_tokens') === 32 });
}
