"""Mixture-of-experts execution in plain loops and float64, written from the documentation, not the code."""

import numpy as np


def softmax(logits):
    exp = np.exp(logits - logits.max(-1, keepdims=True))
    return exp / exp.sum(-1, keepdims=True)


def silu(x):
    return x / (1 + np.exp(-x))


def clamped_swiglu(gate, up, limit, alpha):
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return (up + 1) * gate / (1 + np.exp(-alpha * gate))


def biased_moe(x, ids, weights, matrices, biases, limit, alpha):
    """`moe` of experts with biases and a clamped SwiGLU."""
    (gate, up, down), (gate_bias, up_bias, down_bias) = (
        [np.asarray(array, np.float64) for array in arrays] for arrays in (matrices, biases)
    )
    out = np.zeros(x.shape)
    for n, token in enumerate(np.asarray(ids)):
        for j, e in enumerate(token):
            if e < gate.shape[0]:
                hidden = clamped_swiglu(
                    x[n] @ gate[e] + gate_bias[e], x[n] @ up[e] + up_bias[e], limit, alpha
                )
                out[n] += np.float64(weights[n, j]) * (hidden @ down[e] + down_bias[e])
    return out


def moe(x, ids, weights, gate, up, down):
    """Σ_j weights[n, j] · expert ids[n, j] of x[n]; an id of E stands for no expert."""
    x, weights, gate, up, down = (np.asarray(a, np.float64) for a in (x, weights, gate, up, down))
    out = np.zeros_like(x)
    for n, token in enumerate(np.asarray(ids)):
        for j, expert in enumerate(token):
            if expert < gate.shape[0]:
                hidden = silu(x[n] @ gate[expert]) * (x[n] @ up[expert])
                out[n] += weights[n, j] * (hidden @ down[expert])
    return out


def drop(ids, num_experts, room):
    """Which assignments fit: all first choices in token order, then all second choices, and so on."""
    used = np.zeros(num_experts, int)
    kept = np.zeros(ids.shape, bool)
    for j in range(ids.shape[1]):
        for n in range(ids.shape[0]):
            expert = ids[n, j]
            if expert < num_experts and used[expert] < room:
                used[expert] += 1
                kept[n, j] = True
    return kept


def reroute(ids, ranking, num_experts, room):
    """Assignments made when an expert that is full refuses, and the refused ask for their next best.

    Rounds: every pending assignment asks, those of one token for consecutive places of its ranking; each
    expert accepts first choices first and then by token order. `ranking[n]` lists all experts of token n.
    """
    N, k = ids.shape
    made = np.full((N, k), num_experts)
    pending = ids < num_experts
    asked = np.zeros(N, int)
    used = np.zeros(num_experts, int)
    while any(pending[n].any() and asked[n] < num_experts for n in range(N)):
        requests: list[list[tuple[int, int]]] = [[] for _ in range(num_experts)]
        for n in range(N):
            for j in range(k):
                if pending[n, j] and asked[n] < num_experts:
                    requests[ranking[n][asked[n]]].append((j, n))
                    asked[n] += 1
        for expert, queue in enumerate(requests):
            for j, n in sorted(queue):
                if used[expert] < room:
                    used[expert] += 1
                    made[n, j] = expert
                    pending[n, j] = False
    return made
