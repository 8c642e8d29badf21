"""Users who ask a server of `python -m experiments.serve` for completions, every second one as a stream.

locust -f deploy/load/locustfile.py --host http://127.0.0.1:8000 --headless -u 8 -r 8 -t 30s
"""

import os
import random

from locust import HttpUser, between, task

MODEL = os.environ.get("MODEL", "tiny")
PROMPTS = ("The function returns", "This class is", "If the argument is")


class User(HttpUser):
    wait_time = between(0.0, 0.1)

    def body(self, **more: object) -> dict[str, object]:
        return {
            "model": MODEL,
            "prompt": random.choice(PROMPTS),
            "max_tokens": 32,
            "ignore_eos": True,
            **more,
        }

    @task
    def whole(self) -> None:
        self.client.post("/v1/completions", json=self.body())

    @task
    def streamed(self) -> None:
        path, body = "/v1/completions", self.body(stream=True)
        with self.client.post(
            path, json=body, stream=True, name=f"{path} (stream)", catch_response=True
        ) as answer:
            lines = [line for line in answer.iter_lines() if line]
            if answer.status_code == 200 and lines[-1:] != [b"data: [DONE]"]:
                answer.failure("the stream broke off")
