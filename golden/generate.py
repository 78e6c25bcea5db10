#!/usr/bin/env python3
"""Writes golden files: inputs drawn by numpy, results from implementations that other people wrote.

    python golden/generate.py OUT [STEM ..]

writes OUT/<stem>.safetensors for every stem named, or for all; golden/README.md has the format. `cargo xtask golden bless`
calls it. The packages are those of golden/requirements.txt. No GPU is needed: PyTorch runs on the CPU, and the kernels of
flash-linear-attention run in Triton's interpreter.

Two kinds of sources:

- functions of PyTorch, and the plain functions of flash-linear-attention, both in float64; gradients come from PyTorch's
  autograd through them;
- the kernels of flash-linear-attention, in float32; gradients come from its own backward kernels.

Where an operation of this project is a composition that no package has (the blend of branches, say), the composition is
written here in functions of PyTorch, and its gradient is autograd's.
"""

import argparse
import contextlib
import json
import os
import struct
import sys
import zlib
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

# Before Triton is imported: its kernels then run on the CPU, in the float32 they would use on a GPU.
os.environ["TRITON_INTERPRET"] = "1"

PACKAGES_MISSING = 3

try:
    import numpy as np
    import scipy.linalg
    import torch
    import torch.nn.functional as F
    import triton
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.modules.l2norm import l2norm
    from fla.modules.norm.fused_norm_gate import rms_norm_gated
    from fla.modules.norm.layernorm import rms_norm
    from fla.ops.common import chunk_delta_h
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
    from fla.ops.gdn2 import chunk_gdn2
    from fla.ops.gdn2.naive import naive_chunk_gdn2, naive_recurrent_gdn2
    from fla.ops.kda import chunk_kda, fused_recurrent_kda
    from fla.ops.kda.gate import fused_kda_gate, naive_kda_gate, naive_kda_lowerbound_gate
    from fla.ops.kda.naive import naive_chunk_kda, naive_recurrent_kda
    from torch.optim.swa_utils import get_ema_multi_avg_fn
except ImportError as error:
    print(f"{error}; install the packages of golden/requirements.txt", file=sys.stderr)
    sys.exit(PACKAGES_MISSING)

# The interpreter has no clock to choose a kernel's configuration by; the first one is as good as any.
triton.runtime.autotuner.Autotuner._bench = lambda *_, **__: [0.0, 0.0, 0.0]


class Index(int):
    """A loop's counter: the interpreter counts in Python's integers, which do not have the method that kernels call."""

    def to(self, _):
        return self


chunk_delta_h.range = lambda *bounds: map(Index, range(*bounds))
# One order of sums, whatever the machine.
torch.set_num_threads(1)

SEED = 20260


@dataclass
class Origin:
    """Where values come from, and how far from them an exact result may be."""

    source: str
    packages: tuple
    tol: float
    why: str


@dataclass
class Case:
    """One case: arrays by tensor name, and the case of the operation's table whose config applies."""

    config: str
    inputs: dict
    outputs: dict = field(default_factory=dict)
    upstream: dict = field(default_factory=dict)
    grads: dict = field(default_factory=dict)
    origin: Origin = None


TWO_ORDERS = "one formula in two orders of operation, f64: 5000 eps"
FLOAT32 = "the source computes in f32: rounding 6e-8 times sqrt(1000)"


def double(source, *packages, tol=1e-12, why=TWO_ORDERS):
    return Origin(source, packages, tol, why)


def single(source, tol=2e-6, why=FLOAT32):
    return Origin(f"{source}, kernels in Triton's interpreter", ("fla-core", "triton", "torch"), tol, why)


TORCH = ("torch",)
NUMPY = {torch.float64: np.float64, torch.float32: np.float32}
STEMS = {}


def stem(name):
    """Registers a function that gives an origin and cases by name."""

    def register(function):
        STEMS[name] = function
        return function

    return register


@contextlib.contextmanager
def as_double(*names):
    """Makes float64 of the types that code asks for by these names of torch, so that it keeps all digits."""
    kept = {name: getattr(torch, name) for name in names}
    method = torch.Tensor.float
    try:
        for name in names:
            setattr(torch, name, torch.float64)
        torch.Tensor.float = torch.Tensor.double
        yield
    finally:
        for name, value in kept.items():
            setattr(torch, name, value)
        torch.Tensor.float = method


def differentiate(rng, config, inputs, learned, function, without_upstream=(), dtype=torch.float64, origin=None):
    """A case of `function` (tensors by name to outputs by name) with the gradients of the inputs `learned`."""
    number = NUMPY[dtype]
    inputs = {name: np.asarray(x, number) for name, x in inputs.items()}
    leaves = {name: torch.tensor(x, requires_grad=name in learned) for name, x in inputs.items()}
    outputs = function(leaves)
    upstream = {}
    for name, y in outputs.items():
        if name not in without_upstream:
            upstream[name] = rng.standard_normal(tuple(y.shape)).astype(number)
    if learned:
        torch.autograd.backward([outputs[n] for n in upstream], [torch.tensor(x) for x in upstream.values()])
    grads = {name: leaves[name].grad.numpy() for name in learned}
    results = {name: y.detach().numpy() for name, y in outputs.items()}
    return Case(config, inputs, results, upstream if learned else {}, grads, origin)


def unit_rows(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def one(x):
    return np.array([x], np.float64)


def with_zero_row(x):
    x[0, 0] = 0.0
    return x


# Normalisations.


@stem("rms_norm")
def _(rng):
    def inputs(b, t, d, shift):
        drawn = {"x": rng.standard_normal((b, t, d)), "gain": 1.0 + 0.3 * rng.standard_normal(d)}
        return drawn | ({"shift": 0.5 * rng.standard_normal(d)} if shift else {})

    def norm(eps):
        def function(x):
            c = x["x"] + x["shift"] if "shift" in x else x["x"]
            y = F.rms_norm(c, c.shape[-1:], x["gain"], eps)
            return {"y": y, "c": c} if "shift" in x else {"y": y}

        return function

    zero = inputs(3, 4, 6, False)
    with_zero_row(zero["x"])
    kernel = single("fla.modules.rms_norm")
    return double("torch.nn.functional.rms_norm", *TORCH), {
        "shift": differentiate(
            rng, "b2-t5-d8-eps1e-3-normal-shift", inputs(2, 5, 8, True), ["x", "gain", "shift"], norm(1e-3)
        ),
        "small_eps": differentiate(
            rng, "b1-t3-d16-eps1e-8-normal-shift", inputs(1, 3, 16, True), ["x", "gain", "shift"], norm(1e-8)
        ),
        "zero_row": differentiate(rng, "b3-t4-d6-eps1e-3-zero-row", zero, ["x", "gain"], norm(1e-3)),
        "fla": differentiate(
            rng,
            "b3-t4-d6-eps1e-3-zero-row",
            inputs(2, 7, 24, False),
            ["x", "gain"],
            lambda x: {"y": rms_norm(x["x"], x["gain"], None, eps=1e-3)},
            dtype=torch.float32,
            origin=kernel,
        ),
    }


@stem("layer_norm")
def _(rng):
    def inputs(b, t, d, affine):
        drawn = {"x": rng.standard_normal((b, t, d))}
        return drawn | (
            {"gain": 1.0 + 0.3 * rng.standard_normal(d), "bias": 0.5 * rng.standard_normal(d)} if affine else {}
        )

    def norm(eps, plus):
        def function(x):
            y = F.layer_norm(x["x"], x["x"].shape[-1:], x.get("gain"), x.get("bias"), eps)
            return {"y": y, "plus": x["x"].clone()} if plus else {"y": y}

        return function

    far, zero = inputs(2, 3, 12, True), inputs(3, 4, 6, True)
    far["x"] += 3.0
    with_zero_row(zero["x"])
    names = ["x", "gain", "bias"]
    return double("torch.nn.functional.layer_norm", *TORCH), {
        "plus": differentiate(rng, "b2-t5-d8-eps1e-5-normal-gain-plus", inputs(2, 5, 8, True), names, norm(1e-5, True)),
        "plain": differentiate(rng, "b1-t3-d16-eps1e-5-normal-plus", inputs(1, 3, 16, False), ["x"], norm(1e-5, True)),
        "far_mean": differentiate(rng, "b2-t3-d12-eps1e-5-far-mean-gain-plus", far, names, norm(1e-5, True)),
        "zero_row": differentiate(rng, "b3-t4-d6-eps1e-3-zero-row-gain", zero, names, norm(1e-3, False)),
    }


@stem("l2_norm")
def _(rng):
    # x / sqrt(sum x^2 + eps) is the RMS norm with eps / K, over sqrt(K): the constant is its weight.
    def norm(eps):
        def function(x):
            k = x["x"].shape[-1]
            return {"y": F.rms_norm(x["x"], (k,), torch.full((k,), k**-0.5, dtype=torch.float64), eps / k)}

        return function

    near_eps = {"x": 1e-3 * rng.standard_normal((2, 3, 3, 5))}
    return double("torch.nn.functional.rms_norm with weight K^(-1/2)", *TORCH), {
        "plain": differentiate(
            rng, "b2-t5-h3-k8-eps1e-6-normal", {"x": rng.standard_normal((2, 5, 3, 8))}, ["x"], norm(1e-6)
        ),
        "near_eps": differentiate(rng, "b2-t3-h3-k5-eps1e-6-near-eps", near_eps, ["x"], norm(1e-6)),
        "fla": differentiate(
            rng,
            "b2-t5-h3-k8-eps1e-6-normal",
            {"x": rng.standard_normal((2, 5, 3, 16))},
            ["x"],
            lambda x: {"y": l2norm(x["x"], 1e-6)},
            dtype=torch.float32,
            origin=single("fla.modules.l2norm"),
        ),
    }


@stem("gated_rms_norm")
def _(rng):
    def inputs(*shape):
        return {
            "o": rng.standard_normal(shape),
            "zeta": rng.standard_normal(shape),
            "gain": 1.0 + 0.3 * rng.standard_normal(shape[-1]),
        }

    def norm(eps):
        return lambda x: {"y": F.rms_norm(x["o"], x["o"].shape[-1:], x["gain"], eps) * torch.sigmoid(x["zeta"])}

    small = inputs(2, 3, 2, 16)
    small["o"] *= 3e-3
    names = ["o", "zeta", "gain"]
    return double("torch.nn.functional.rms_norm and torch.sigmoid", *TORCH), {
        "plain": differentiate(rng, "b2-t5-h3-v8-eps1e-5-normal", inputs(2, 5, 3, 8), names, norm(1e-5)),
        "small_rows": differentiate(rng, "b2-t3-h2-v16-eps1e-8-small-rows", small, names, norm(1e-8)),
        "fla": differentiate(
            rng,
            "b2-t5-h3-v8-eps1e-5-normal",
            inputs(2, 5, 3, 16),
            names,
            lambda x: {"y": rms_norm_gated(x["o"], x["zeta"], x["gain"], None, "sigmoid", eps=1e-5)},
            dtype=torch.float32,
            origin=single("fla.modules.fused_norm_gate.rms_norm_gated"),
        ),
    }


# Attention.


@stem("short_conv")
def _(rng):
    def inputs(b, t, c, *present):
        drawn = {"x": rng.standard_normal((b, t, c)), "weight": 0.5 * rng.standard_normal((4, c))}
        if "context" in present:
            drawn["context"] = rng.standard_normal((b, 3, c))
        if "bias" in present:
            drawn["bias"] = 0.5 * rng.standard_normal(c)
        return drawn

    def convolution(x):
        before = x["context"] if "context" in x else torch.zeros_like(x["x"][:, :1]).repeat(1, 3, 1)
        whole = torch.cat([before, x["x"]], 1)
        mixed = F.conv1d(whole.transpose(1, 2), x["weight"].T.unsqueeze(1), x.get("bias"), groups=whole.shape[2])
        return {"y": F.silu(mixed).transpose(1, 2), "context": whole[:, -3:]}

    def kernel(x):
        # Its state has the four last tokens, of which the next part does not read the oldest.
        y, after = causal_conv1d(
            x["x"], x["weight"].T.contiguous(), x["bias"], output_final_state=True, activation="silu"
        )
        return {"y": y, "context": after[:, :, 1:].transpose(1, 2).contiguous()}

    every = ["x", "weight", "context", "bias"]
    return double("torch.nn.functional.conv1d and silu", *TORCH), {
        "carried": differentiate(
            rng, "b2-t9-c5-normal-carried-context-bias", inputs(2, 9, 5, "context", "bias"), every, convolution
        ),
        "short": differentiate(
            rng, "b3-t2-c3-normal-carried-context-bias", inputs(3, 2, 3, "context", "bias"), every, convolution
        ),
        "first": differentiate(rng, "b2-t7-c3-normal", inputs(2, 7, 3), ["x", "weight"], convolution, ["context"]),
        "fla": differentiate(
            rng,
            "b2-t6-c4-saturated-carried-bias",
            inputs(2, 10, 16, "bias"),
            ["x", "weight", "bias"],
            kernel,
            ["context"],
            torch.float32,
            single("fla.modules.causal_conv1d"),
        ),
    }


@stem("decay_gate")
def _(rng):
    def inputs(b, t, h, k):
        return {
            "z": 2.0 * rng.standard_normal((b, t, h, k)),
            "y": 2.0 * rng.standard_normal((b, t, h)),
            "a_log": 0.5 * rng.standard_normal(h),
            "dt_bias": rng.standard_normal((h, k)),
        }

    def gate(bound, beta_scale, function, **options):
        def both(x):
            bounded = {} if bound is None else {"lower_bound": bound}
            g = function(x["z"], x["a_log"], x["dt_bias"].reshape(-1), **bounded, **options)
            return {"g": g, "beta": beta_scale * torch.sigmoid(x["y"])}

        return both

    def plain(bound, beta_scale):
        function = naive_kda_gate if bound is None else naive_kda_lowerbound_gate
        return gate(bound, beta_scale, function, output_dtype=torch.float64)

    names = ["z", "y", "a_log", "dt_bias"]
    kernel = single("fla.ops.kda.gate.fused_kda_gate")
    with as_double("float"):
        cases = {
            "bounded": differentiate(
                rng, "b2-t5-h3-k4-bounded-5-beta1-normal", inputs(2, 5, 3, 4), names, plain(-5.0, 1.0)
            ),
            "bounded_negative": differentiate(
                rng, "b2-t5-h3-k4-bounded-5-beta2-open", inputs(2, 5, 3, 4), names, plain(-5.0, 2.0)
            ),
            "strongest": differentiate(
                rng, "b1-t3-h2-k3-bounded-5.9-beta1-normal", inputs(1, 3, 2, 3), names, plain(-5.9, 1.0)
            ),
            "softplus": differentiate(
                rng, "b2-t5-h3-k4-softplus-beta2-normal", inputs(2, 5, 3, 4), names, plain(None, 2.0)
            ),
        }
    for name, config, bound, scale in [
        ("fla_bounded", "b2-t5-h3-k4-bounded-5-beta1-normal", -5.0, 1.0),
        ("fla_softplus", "b2-t5-h3-k4-softplus-beta2-normal", None, 2.0),
    ]:
        cases[name] = differentiate(
            rng,
            config,
            inputs(2, 5, 3, 16),
            names,
            gate(bound, scale, fused_kda_gate),
            dtype=torch.float32,
            origin=kernel,
        )
    return (
        double(
            "fla.ops.kda.gate.naive_kda_gate and naive_kda_lowerbound_gate in f64, torch.sigmoid", "fla-core", "torch"
        ),
        cases,
    )


KDA_GRADS = ["q", "k", "v", "g", "beta", "initial_state"]


def kda_inputs(rng, b, t, h, k, v, gates="spread", value_heads=None):
    hv = value_heads or h
    keys = unit_rows(rng.standard_normal((b, t, h, k)))
    g = -5.0 / (1.0 + np.exp(-2.0 * rng.standard_normal((b, t, hv, k))))
    if gates == "mild":
        g = -0.5 * rng.uniform(0.02, 1.0, g.shape)
    if gates == "cut":
        g = np.where(rng.uniform(size=g.shape) < 0.2, -np.inf, g)
    if gates == "repeated":
        keys = np.broadcast_to(keys[:, :1], keys.shape).copy()
        g = 0.02 * g
    return {
        "q": unit_rows(rng.standard_normal((b, t, h, k))),
        "k": keys,
        "v": rng.standard_normal((b, t, hv, v)),
        "g": g,
        "beta": rng.uniform(0.05, 1.0, (b, t, hv)),
        "initial_state": rng.standard_normal((b, hv, k, v)),
    }


@stem("kda")
def _(rng):
    recurrent = "b2-t13-h2-k5-v3-recurrent-save4-spread-initial_state-final_state"
    sixteen = "b2-t13-h2-k5-v3-chunk16-save4-spread-initial_state-final_state"
    four = "b1-t18-h2-k4-v6-chunk4-recompute8-init-initial_state-final_state"
    sixty_four = "b1-t200-h1-k5-v3-chunk64-save64-init-initial_state-final_state"

    def through(function, channels=False, **options):
        """A run of `function`; with `channels` it takes gates by channel, which are beta where there is none."""

        def call(x):
            gates = [x["beta"]]
            if channels:
                beta, sizes = x["beta"].unsqueeze(-1), {"b": x["k"].shape[-1], "w": x["v"].shape[-1]}
                gates = [x[name] if name in x else beta.expand(*beta.shape[:-1], size) for name, size in sizes.items()]
            names = [x[name] for name in ["q", "k", "v", "g"]]
            o, state = function(*names, *gates, initial_state=x["initial_state"], output_final_state=True, **options)
            return {"o": o, "final_state": state}

        return call

    def one_by_one(call):
        """Packed sequences as calls of their own."""

        def run(x):
            ends = x["cu_seqlens"].long().tolist()
            parts = []
            for n, (a, b) in enumerate(zip(ends, ends[1:])):
                part = {name: x[name][:, a:b] for name in ["q", "k", "v", "g", "beta"]}
                parts.append(call(part | {"initial_state": x["initial_state"][n : n + 1]}))
            return {
                "o": torch.cat([part["o"] for part in parts], 1),
                "final_state": torch.cat([part["final_state"] for part in parts]),
            }

        return run

    def with_one_decay(x):
        # With the same decay in every channel of a head, KDA is the gated delta rule.
        o, state = naive_recurrent_gated_delta_rule(
            x["q"], x["k"], x["v"], x["beta"], x["g"][..., 0], initial_state=x["initial_state"], output_final_state=True
        )
        return {"o": o, "final_state": state}

    def packed(x):
        o, state = chunk_kda(
            *[x[name] for name in ["q", "k", "v", "g", "beta"]],
            initial_state=x["initial_state"],
            output_final_state=True,
            cu_seqlens=x["cu_seqlens"].long(),
        )
        return {"o": o, "final_state": state}

    def draw(*shape, channels=(), ends=(), **options):
        inputs = kda_inputs(rng, *shape, **options)
        for name in channels:
            inputs[name] = rng.uniform(0.05, 1.0, inputs["g" if name == "b" else "v"].shape)
        if ends:
            inputs["cu_seqlens"] = np.array(ends, np.float64)
            inputs["initial_state"] = rng.standard_normal((len(ends) - 1, *inputs["initial_state"].shape[1:]))
        return inputs

    plain = through(naive_recurrent_kda)
    gdn2 = through(naive_recurrent_gdn2, channels=True)
    named = lambda source: double(f"{source} in f64", "fla-core", "torch")
    recurrent_kda = named("fla.ops.kda.naive.naive_recurrent_kda")
    chunk = named("fla.ops.kda.naive.naive_chunk_kda")
    recurrent_gdn2 = named("fla.ops.gdn2.naive.naive_recurrent_gdn2")
    chunk_gdn2_plain = named("fla.ops.gdn2.naive.naive_chunk_gdn2")
    delta_rule = named("fla.ops.gated_delta_rule.naive.naive_recurrent_gated_delta_rule")
    one_decay = draw(1, 11, 2, 6, 4)
    one_decay["g"] = np.broadcast_to(one_decay["g"][..., :1], one_decay["g"].shape).copy()
    without_g = [name for name in KDA_GRADS if name != "g"]
    # With both gates by channel beta is not read.
    both = [name for name in KDA_GRADS if name != "beta"] + ["b", "w"]
    ends = [0, 5, 5, 12]

    plain_cases = {
        "recurrent": (recurrent, draw(2, 9, 2, 5, 3), KDA_GRADS, plain, recurrent_kda),
        "recurrent_against_chunks": (sixteen, draw(1, 19, 1, 4, 7), KDA_GRADS, plain, recurrent_kda),
        "cut": (recurrent, draw(1, 11, 2, 6, 4, gates="cut"), KDA_GRADS, plain, recurrent_kda),
        "cut_against_chunks": (four, draw(1, 11, 2, 6, 4, gates="cut"), KDA_GRADS, plain, recurrent_kda),
        "repeated_keys": (sixteen, draw(1, 20, 1, 6, 4, gates="repeated"), KDA_GRADS, plain, recurrent_kda),
        "chunk": (
            recurrent,
            draw(1, 24, 1, 4, 6, gates="mild"),
            KDA_GRADS,
            through(naive_chunk_kda, chunk_size=8),
            chunk,
        ),
        "chunk_against_chunks": (
            sixteen,
            draw(1, 40, 1, 5, 3, gates="mild"),
            KDA_GRADS,
            through(naive_chunk_kda, chunk_size=20),
            chunk,
        ),
        "gated_delta_rule": (four, one_decay, without_g, with_one_decay, delta_rule),
        # With the same number in every channel of both gates, Gated DeltaNet-2 is KDA.
        "gdn2_as_kda": (recurrent, draw(1, 9, 2, 5, 3), KDA_GRADS, gdn2, recurrent_gdn2),
        "gdn2_as_kda_chunk": (
            sixteen,
            draw(1, 13, 1, 5, 3, gates="mild"),
            KDA_GRADS,
            through(naive_chunk_gdn2, channels=True, chunk_size=8),
            chunk_gdn2_plain,
        ),
        "gdn2": (recurrent, draw(1, 9, 2, 5, 3, channels="bw"), both, gdn2, recurrent_gdn2),
        "gdn2_against_chunks": (four, draw(1, 10, 1, 5, 3, channels="bw"), both, gdn2, recurrent_gdn2),
        "erase_gate": (four, draw(1, 7, 2, 4, 3, channels="b"), KDA_GRADS + ["b"], gdn2, recurrent_gdn2),
        "write_gate": (recurrent, draw(1, 7, 2, 4, 3, channels="w"), KDA_GRADS + ["w"], gdn2, recurrent_gdn2),
        "grouped": (recurrent, draw(1, 7, 2, 4, 3, value_heads=4), KDA_GRADS, plain, recurrent_kda),
        "grouped_against_chunks": (four, draw(1, 7, 1, 4, 3, value_heads=3), KDA_GRADS, plain, recurrent_kda),
        "packed": (recurrent, draw(1, 12, 2, 4, 3, ends=ends), KDA_GRADS, one_by_one(plain), recurrent_kda),
        "packed_against_chunks": (four, draw(1, 12, 1, 4, 3, ends=ends), KDA_GRADS, one_by_one(plain), recurrent_kda),
    }
    # These kernels take every decay as the difference of two running sums within a chunk of 64 tokens.
    sums = (
        "the source computes in f32: running sums of g up to 64 * 2.5 = 160 round by 160 * 6e-8, "
        "which is relative after exp"
    )
    chunk_kernel = single("fla.ops.kda.chunk_kda")
    kernel_cases = {
        "fla_chunk": (sixty_four, draw(1, 68, 1, 8, 8, gates="mild"), KDA_GRADS, through(chunk_kda), chunk_kernel),
        "fla_chunk_spread": (
            sixteen,
            draw(1, 68, 1, 8, 8),
            KDA_GRADS,
            through(chunk_kda),
            single("fla.ops.kda.chunk_kda", 1e-5, sums),
        ),
        "fla_packed": (four, draw(1, 12, 1, 8, 8, gates="mild", ends=ends), KDA_GRADS, packed, chunk_kernel),
        "fla_gdn2": (
            four,
            draw(1, 10, 1, 8, 8, gates="mild", channels="bw"),
            both,
            through(chunk_gdn2, channels=True),
            single("fla.ops.gdn2.chunk_gdn2"),
        ),
        "fla_recurrent": (
            recurrent,
            draw(1, 12, 2, 8, 8),
            [],
            through(fused_recurrent_kda),
            single("fla.ops.kda.fused_recurrent_kda"),
        ),
    }
    cases = {}
    with as_double("float", "float32"):
        for name, (config, inputs, learned, function, origin) in plain_cases.items():
            origin = None if origin is recurrent_kda else origin
            cases[name] = differentiate(rng, config, inputs, learned, function, origin=origin)
    for name, (config, inputs, learned, function, origin) in kernel_cases.items():
        cases[name] = differentiate(rng, config, inputs, learned, function, dtype=torch.float32, origin=origin)
    return recurrent_kda, cases


# Maps and the model's own compositions.


@stem("linear")
def _(rng):
    def linear(x):
        y = F.linear(x["x"], x["weight"].T, x.get("bias"))
        return {"y": y, "plus": x["x"].clone()}

    def inputs(b, t, i, o):
        return {
            "x": rng.standard_normal((b, t, i)),
            "weight": rng.standard_normal((i, o)),
            "bias": rng.standard_normal(o),
        }

    bare = inputs(3, 4, 6, 6)
    del bare["bias"]
    return double("torch.nn.functional.linear", *TORCH), {
        "bias": differentiate(rng, "b2-t5-i8-o3-normal-bias-plus", inputs(2, 5, 8, 3), ["x", "weight", "bias"], linear),
        "bare": differentiate(rng, "b3-t4-i6-o6-normal-plus", bare, ["x", "weight"], linear),
        "wide": differentiate(
            rng, "b2-t7-i33-o17-activations-bias-plus", inputs(2, 7, 33, 17), ["x", "weight", "bias"], linear
        ),
    }


@stem("embedding")
def _(rng):
    def case(config, b, t, v, d):
        inputs = {"ids": rng.integers(0, v, (b, t)).astype(np.float64), "table": rng.standard_normal((v, d))}
        return differentiate(rng, config, inputs, ["table"], lambda x: {"x": F.embedding(x["ids"].long(), x["table"])})

    return double("torch.nn.functional.embedding", *TORCH), {
        "plain": case("b2-t5-v7-d3-uniform", 2, 5, 7, 3),
        "bytes": case("b3-t4-v256-d8-uniform", 3, 4, 256, 8),
    }


@stem("cross_entropy")
def _(rng):
    def case(config, b, t, c, mask=False, size=2.0, denominator=None):
        inputs = {
            "logits": size * rng.standard_normal((b, t, c)),
            "targets": rng.integers(0, c, (b, t)).astype(np.float64),
        }
        if mask:
            inputs["mask"] = (rng.uniform(size=(b, t)) < 0.7).astype(np.float64)
            inputs["mask"][0, :2] = [1.0, 0.0]

        def loss(x):
            targets = x["targets"].long().flatten()
            if mask:
                targets = torch.where(x["mask"].flatten() == 1.0, targets, -100)
            logits = x["logits"].flatten(0, 1)
            nll = F.cross_entropy(logits, targets, reduction="none")
            if denominator is None:
                mean = F.cross_entropy(logits, targets)
            else:
                mean = F.cross_entropy(logits, targets, reduction="sum") / denominator
            return {"loss": mean.reshape(1), "nll": nll.reshape(b, t)}

        return differentiate(rng, config, inputs, ["logits"], loss, ["nll"])

    return double("torch.nn.functional.cross_entropy", *TORCH), {
        "plain": case("b2-t5-c7-normal", 2, 5, 7),
        "mask": case("b2-t6-c5-normal-mask", 2, 6, 5, True),
        "over_40": case("b2-t4-c3-normal-over40-mask", 2, 4, 3, True, denominator=40),
        "huge": case("b2-t6-c5-huge-mask", 2, 6, 5, True, size=300.0),
        "bytes": case("b1-t2-c256-normal", 1, 6, 256),
    }


@stem("spectral")
def _(rng):
    def inputs(b, t, i, o, r):
        return {
            "x": rng.standard_normal((b, t, i)),
            "u": rng.standard_normal((i, r)) / i**0.5,
            "s": rng.uniform(0.2, 2.0, r),
            "v": rng.standard_normal((o, r)) / o**0.5,
        }

    def spectral(x, rounded=lambda factor: factor):
        # The whole matrix, which the operation never forms.
        weight = torch.linalg.multi_dot([rounded(x["u"]), torch.diag(x["s"]), rounded(x["v"]).T])
        return {"y": F.linear(x["x"], weight.T), "plus": x["x"].clone()}

    def cast(dtype):
        def rounded(factor):
            scale = torch.ones(())
            if dtype == torch.float8_e4m3fn:
                # The least power of two that leaves no element of the column above the largest number.
                scale = torch.exp2(torch.ceil(torch.log2(factor.abs().amax(0) / torch.finfo(dtype).max))).detach()
            # Straight through: the second term is zero and has the gradient of one.
            return ((factor / scale).to(dtype).double() * scale).detach() + (factor - factor.detach())

        return lambda x: spectral(x, rounded)

    def spread(b, t, i, o, r):
        """Factors over 24 powers of two, as numbers of f32, some of them halfway between two numbers of e4m3."""
        drawn = inputs(b, t, i, o, r)
        for name in "uv":
            factor = drawn[name] * np.exp2(rng.integers(-20, 5, drawn[name].shape))
            factor[:3] = np.array([[1.0625], [1.1875], [-1.3125]]) * np.exp2(rng.integers(-3, 3, (3, r)))
            drawn[name] = factor.astype(np.float32).astype(np.float64)
        return drawn

    zero = inputs(2, 3, 7, 5, 4)
    zero["s"][1::2] = 0.0
    names = ["x", "u", "s", "v"]
    formats = {"bf16": torch.bfloat16, "f16": torch.float16, "fp8": torch.float8_e4m3fn}
    rounded = {
        f"{word}": differentiate(rng, f"b2-t3-i13-o9-r4-spread-{word}", spread(2, 3, 13, 9, 4), names, cast(dtype))
        for word, dtype in formats.items()
    }
    return double("torch.linalg.multi_dot, torch.nn.functional.linear and casts", *TORCH), rounded | {
        "plain": differentiate(rng, "b2-t5-i8-o6-r4-normal-plus", inputs(2, 5, 8, 6, 4), names, spectral),
        "zeros": differentiate(rng, "b2-t3-i7-o5-r4-s-zero-plus", zero, names, spectral),
        "wide": differentiate(rng, "b2-t7-i33-o17-r5-activations-plus", inputs(2, 7, 33, 17, 5), names, spectral),
    }


@stem("expert")
def _(rng):
    def case(config, e, d, f, r, gated):
        rows = {"up_u": d, "up_v": f, "down_u": f, "down_v": d, "gate_u": d, "gate_v": f}
        inputs = {"u": rng.standard_normal((2, 5, d))}
        for part in ["up", "down"] + (["gate"] if gated else []):
            for side in "uv":
                name = f"{part}_{side}"
                inputs[name] = rng.standard_normal((e, rows[name], r)) / rows[name] ** 0.5
            inputs[f"{part}_s"] = rng.uniform(0.2, 2.0, (e, r))

        def experts(x):
            def weight(part, i):
                return torch.linalg.multi_dot([x[f"{part}_v"][i], torch.diag(x[f"{part}_s"][i]), x[f"{part}_u"][i].T])

            ys = []
            for i in range(e):
                h = F.linear(x["u"], weight("up", i))
                act = F.silu(F.linear(x["u"], weight("gate", i))) * h if gated else F.silu(h)
                ys.append(F.linear(act, weight("down", i)))
            return {"y": torch.stack(ys), "plus": x["u"].clone()}

        return differentiate(rng, config, inputs, list(inputs), experts)

    return double("torch.nn.functional.linear and silu, torch.linalg.multi_dot", *TORCH), {
        "silu": case("b2-t5-e2-d6-f9-r4-normal-silu-plus", 2, 6, 9, 4, False),
        "swiglu": case("b2-t5-e2-d6-f9-r4-normal-swiglu-plus", 2, 6, 9, 4, True),
    }


@stem("controller")
def _(rng):
    def case(config, b, t, d, e):
        inputs = {
            "c": rng.standard_normal((b, t, d)),
            "x0": rng.standard_normal((b, t, d)),
            "weight": 0.5 * rng.standard_normal((2 * d, 3 + e)),
        }

        def gates(x):
            raw = F.linear(torch.cat([x["c"], x["x0"]], -1), x["weight"].T)
            both = torch.cat([torch.sigmoid(raw[..., :3]), F.softmax(raw[..., 3:], -1)], -1)
            return {"gates": both, "plus_c": x["c"].clone(), "plus_x0": x["x0"].clone()}

        return differentiate(rng, config, inputs, ["c", "x0", "weight"], gates)

    return double("torch.nn.functional.linear and softmax, torch.sigmoid", *TORCH), {
        "two": case("b2-t5-d8-e2-normal-plus_c-plus_x0", 2, 5, 8, 2),
        "four": case("b3-t4-d6-e4-saturated-plus_c-plus_x0", 3, 4, 6, 4),
    }


@stem("blend")
def _(rng):
    def case(config, b, t, d, e, lam_max, memory=True):
        inputs = {
            "gates": rng.uniform(0.05, 0.95, (b, t, 3 + e)),
            "attn": rng.standard_normal((b, t, d)),
            "dense": rng.standard_normal((b, t, d)),
            "experts": rng.standard_normal((e, b, t, d)),
        }
        if memory:
            inputs["memory"] = rng.standard_normal((b, t, d))

        def blend(x):
            attn, m, ffn = [x["gates"][..., i : i + 1] for i in range(3)]
            mixed = torch.einsum("bte,ebtd->btd", x["gates"][..., 3:], x["experts"])
            recalled = x["memory"] if memory else torch.zeros_like(x["dense"])
            return {"y": attn * x["attn"] + torch.lerp(x["dense"], recalled, lam_max * m) + ffn * mixed}

        return differentiate(rng, config, inputs, list(inputs), blend)

    return double("torch.lerp and torch.einsum", *TORCH), {
        "memory": case("b2-t6-d8-e2-lam0.5-normal-memory", 2, 6, 8, 2, 0.5),
        "all_memory": case("b2-t3-d6-e2-lam1-normal-memory", 2, 3, 6, 2, 1.0),
        "no_memory": case("b2-t4-d8-e2-lam0.5-normal", 2, 4, 8, 2, 0.5, False),
    }


@stem("residual")
def _(rng):
    def case(config, *shape):
        inputs = {"c": rng.standard_normal(shape), "y": rng.standard_normal(shape), "rho": one(rng.uniform(0.5, 1.5))}
        return differentiate(
            rng, config, inputs, ["c", "y", "rho"], lambda x: {"h": torch.addcmul(x["c"], x["rho"], x["y"])}
        )

    return double("torch.addcmul", *TORCH), {
        "plain": case("b2-t5-d8-normal", 2, 5, 8),
        "wide": case("b2-t7-d33-activations", 2, 7, 33),
    }


# The n-gram memory and the teacher's objective.


@stem("engram")
def _(rng):
    def case(config, b, t, d, orders, r, w, plus):
        inputs = {
            "c": rng.standard_normal((b, t, d)),
            "rows": rng.integers(0, r, (b, t, orders)).astype(np.float64),
            "table": rng.standard_normal((r, w)),
            "key": rng.standard_normal((orders * w, d)) / (orders * w) ** 0.5,
            "value": rng.standard_normal((orders * w, d)) / (orders * w) ** 0.5,
        }

        def memory(x):
            e = F.embedding(x["rows"].long(), x["table"]).flatten(-2)
            key, value = F.linear(e, x["key"].T), F.linear(e, x["value"].T)
            s = (F.rms_norm(key, (d,), eps=1e-5) * F.rms_norm(x["c"], (d,), eps=1e-5)).sum(-1, keepdim=True) / d**0.5
            # A signed square root, smooth at 0, with gate_eps 1e-2.
            gate = torch.sigmoid(s / (torch.sqrt(s.abs() + 1e-2) + 0.1))
            return {"m": gate * value} | ({"plus": x["c"].clone()} if plus else {})

        return differentiate(rng, config, inputs, ["c", "table", "key", "value"], memory)

    return double("torch.nn.functional.embedding, linear and rms_norm, torch.sigmoid", *TORCH), {
        "plain": case("b2-t5-d8-o3-r12-w4-normal-plus", 2, 5, 8, 3, 12, 4, True),
        "two_orders": case("b2-t6-d5-o2-r7-w3-one-row", 2, 6, 5, 2, 7, 3, False),
    }


def some_mask(rng, b, t):
    mask = (rng.uniform(size=(b, t)) < 0.6).astype(np.float64)
    mask[0, :3] = [1.0, 0.0, 1.0]
    return mask


@stem("mask_vector")
def _(rng):
    inputs = {"x": rng.standard_normal((2, 7, 5)), "mask": some_mask(rng, 2, 7), "vector": rng.standard_normal(5)}

    def replace(x):
        return {"y": torch.where(x["mask"].unsqueeze(-1) == 1.0, x["vector"], x["x"])}

    return double("torch.where", *TORCH), {
        "some": differentiate(rng, "b2-t7-d5-some", inputs, ["x", "vector"], replace)
    }


@stem("jepa")
def _(rng):
    def case(config, b, t, d, mask):
        inputs = {
            "prediction": rng.standard_normal((b, t, d)),
            "teacher": 2.0 + rng.standard_normal((b, t, d)),
            "mask": mask,
        }

        def loss(x):
            kept = x["mask"] == 1.0
            return {
                "loss": F.l1_loss(x["prediction"][kept], F.layer_norm(x["teacher"][kept], (d,), eps=1e-5)).reshape(1)
            }

        return differentiate(rng, config, inputs, ["prediction"], loss)

    return double("torch.nn.functional.l1_loss and layer_norm", *TORCH), {
        "some": case("b2-t7-d5-some", 2, 7, 5, some_mask(rng, 2, 7)),
        "all": case("b2-t3-d4-all", 2, 3, 4, np.ones((2, 3))),
    }


@stem("koleo")
def _(rng):
    def case(config, b, t, d, mask, limit, plus):
        inputs = {"z": 2.0 + rng.standard_normal((b, t, d)), "mask": mask}

        def loss(x):
            rows = x["z"][x["mask"] == 1.0]
            rows = rows[:: -(-len(rows) // limit)]
            # z / sqrt(|z|^2 + 1e-6) by the RMS norm, as in l2_norm.
            p = F.rms_norm(rows, (d,), torch.full((d,), d**-0.5, dtype=torch.float64), 1e-6 / d)
            apart = torch.cdist(p.detach(), p.detach()).fill_diagonal_(torch.inf)
            nearest = F.pairwise_distance(p, p[apart.argmin(1)], eps=0.0)
            value = -0.5 * torch.log(nearest**2 + 1e-6).mean()
            return {"loss": value.reshape(1)} | ({"plus": x["z"].clone()} if plus else {})

        return differentiate(rng, config, inputs, ["z"], loss)

    return double("torch.cdist and torch.nn.functional.pairwise_distance", *TORCH), {
        "some": case("b2-t7-d12-limit256-some-plus", 2, 7, 12, some_mask(rng, 2, 7), 256, True),
        "all": case("b2-t5-d9-limit256-all", 2, 5, 9, np.ones((2, 5)), 256, False),
        "every_third": case("b2-t8-d10-limit6-all", 2, 8, 10, np.ones((2, 8)), 6, False),
    }


# The optimiser and what goes with it.


@stem("adamw")
def _(rng):
    def cases(name, config, length, groups, scale):
        params = rng.standard_normal(length)
        parts = [torch.nn.Parameter(torch.tensor(params[a:b])) for a, b, _ in groups]
        found = {}
        optimiser = torch.optim.AdamW(
            [{"params": [p], "weight_decay": decay} for p, (_, _, decay) in zip(parts, groups)],
            lr=0.1,
            betas=(0.9, 0.95),
            eps=1e-8,
        )
        flat = {"params": params, "m": np.zeros(length), "v": np.zeros(length)}
        for step in range(1, 11):
            lr, grads = rng.uniform(0.05, 0.3), rng.standard_normal(length)
            for group in optimiser.param_groups:
                group["lr"] = lr
            for p, (a, b, _) in zip(parts, groups):
                p.grad = torch.tensor(scale * grads[a:b])
            optimiser.step()
            after = {key: value.copy() for key, value in flat.items()}
            for p, (a, b, _) in zip(parts, groups):
                after["params"][a:b] = p.detach().numpy()
                after["m"][a:b] = optimiser.state[p]["exp_avg"].numpy()
                after["v"][a:b] = optimiser.state[p]["exp_avg_sq"].numpy()
            inputs = flat | {"grads": grads, "lr": one(lr), "scale": one(scale), "apply": one(1), "updates": one(step)}
            found[f"{name}{step:02}"] = Case(config, inputs, {f"{key}_after": value for key, value in after.items()})
            flat = after
        return found

    return double("torch.optim.AdamW over 10 steps", *TORCH), (
        cases("two_groups", "p40-22to38decay0-3to17decay0.1-middle", 40, [(22, 38, 0.0), (3, 17, 0.1)], 1.0)
        | cases("clipped", "p12-0to12decay0.3-middle", 12, [(0, 12, 0.3)], 0.37)
    )


@stem("row_adam")
def _(rng):
    # Every row is a parameter of its own, so that its updates are counted by themselves; a row that no batch names has no
    # gradient, and PyTorch passes it by.
    height, width, scale = 9, 4, 0.37
    flat = {"table": rng.standard_normal((height, width)), "counts": np.zeros(height)}
    flat |= {"m": np.zeros((height, width)), "v": np.zeros((height, width))}
    parts = [torch.nn.Parameter(torch.tensor(row)) for row in flat["table"]]
    optimiser = torch.optim.Adam(parts, betas=(0.9, 0.95), eps=1e-8)
    cases = {}
    for step in range(1, 6):
        rows = np.append(rng.integers(0, height - 2, 7), height - 1 if step > 1 else 0)
        grads, lr = rng.standard_normal((height, width)), rng.uniform(0.05, 0.3)
        optimiser.param_groups[0]["lr"] = lr
        for i, p in enumerate(parts):
            p.grad = torch.tensor(scale * grads[i]) if i in rows else None
        optimiser.step()
        after = {key: value.copy() for key, value in flat.items()}
        for i in set(rows):
            state = optimiser.state[parts[i]]
            after["table"][i] = parts[i].detach().numpy()
            after["m"][i], after["v"][i] = state["exp_avg"].numpy(), state["exp_avg_sq"].numpy()
            after["counts"][i] = float(state["step"])
        inputs = flat | {
            "grads": grads,
            "rows": rows.astype(np.float64),
            "lr": one(lr),
            "scale": one(scale),
            "apply": one(1),
        }
        cases[f"step{step}"] = Case("r9-w4-n12-middle", inputs, {f"{key}_after": value for key, value in after.items()})
        flat = after
    return double("torch.optim.Adam with a parameter for every row", *TORCH), cases


@stem("muon")
def _(rng):
    def cases(name, config, iterations, entries, steps, origin=None):
        """`entries`: start, [E, rows, columns], heads, scale, weight decay, as in the operation's table."""
        length = entries[-1][0] + int(np.prod(entries[-1][1])) + 1
        flat = {"params": rng.standard_normal(length), "m": rng.standard_normal(length)}
        # Every matrix, and of a matrix with heads every head, by the indices of its elements in the flat buffers.
        places = []
        for start, (e, rows, columns), heads, scale, decay in entries:
            indices = start + np.arange(e * rows * columns).reshape(e, rows, heads, columns // heads)
            places += [(indices[i, :, h], scale, decay) for i in range(e) for h in range(heads)]
            flat["m"][indices] = 0.0
        lr, found = 0.2, {}
        parts = [torch.nn.Parameter(torch.tensor(flat["params"][where])) for where, _, _ in places]
        groups = []
        for p, (where, scale, decay) in zip(parts, places):
            # What its rate is multiplied by is undone here, and the weight decay has the rate without the scale.
            ratio = scale / max(1.0, where.shape[0] / where.shape[1]) ** 0.5
            groups.append({"params": [p], "lr": lr * ratio, "weight_decay": decay / ratio})
        optimiser = torch.optim.Muon(groups, momentum=0.95, nesterov=False, ns_steps=iterations)
        for step in range(1, steps + 1):
            grads = rng.standard_normal(length)
            for p, (where, _, _) in zip(parts, places):
                p.grad = torch.tensor(grads[where])
            with as_double("bfloat16"):
                optimiser.step()
            after = {key: value.copy() for key, value in flat.items()}
            for p, (where, _, _) in zip(parts, places):
                after["params"][where] = p.detach().numpy()
                after["m"][where] = optimiser.state[p]["momentum_buffer"].numpy()
            inputs = flat | {"grads": grads, "lr": one(lr), "apply": one(1)}
            found[f"{name}{step:02}"] = Case(
                config, inputs, {f"{key}_after": value for key, value in after.items()}, origin=origin
            )
            flat = after
        return found

    mixed = [
        (1, [2, 6, 4], 1, 1.0, 0.0),
        (50, [1, 4, 7], 1, 1.5, 0.1),
        (79, [1, 5, 12], 3, 1.0, 0.2),
        (140, [1, 3, 8], 2, 0.5, 0.0),
        (165, [1, 6, 4], 1, 2.0, 0.0),
    ]
    shapes = "2x6x4h1-1x4x7h1-1x5x12h3-1x3x8h2-1x6x4h1"
    why = "2 a^iterations roundings, a = 3.4445: a rounding grows as a vanishing singular value does"
    eight = double("torch.optim.Muon, its iteration in f64", *TORCH, tol=5e-12, why=why)
    return double("torch.optim.Muon, its iteration in f64", *TORCH), (
        cases("mixed", f"{shapes}-ns5-iterate-batched-first", 5, mixed, 3)
        | cases("square", "2x5x5h1-ns5-iterate-batched-middle", 5, [(1, [2, 5, 5], 1, 1.0, 0.1)], 3)
        | cases("eight", f"{shapes}-ns8-iterate-batched-spread", 8, mixed, 2, eight)
    )


POLAR = "f64 rounding; of singular values within 1.25 of each other, 4 iterations leave less than 1e-16, since an error is cubed"


def near_orthonormal(rng, e, n, k):
    left = np.stack([scipy.linalg.qr(rng.standard_normal((n, k)), mode="economic")[0] for _ in range(e)])
    right = np.stack([scipy.linalg.qr(rng.standard_normal((k, k)))[0] for _ in range(e)])
    return np.einsum("enk,ek,ekj->enj", left, rng.uniform(0.9, 1.1, (e, k)), right)


def polar(matrices):
    return np.stack([scipy.linalg.polar(x)[0] for x in matrices])


@stem("retract")
def _(rng):
    def case(config, *shape):
        factor = near_orthonormal(rng, *shape)
        return Case(config, {"factor": factor, "apply": one(1)}, {"factor_after": polar(factor)})

    return double("scipy.linalg.polar", "scipy", "numpy", why=POLAR), {
        "tall": case("e3-n12-k5-i4-step", 3, 12, 5),
        "small": case("e6-n5-k3-i4-step", 6, 5, 3),
        "wide": case("e1-n150-k32-i4-spread4", 1, 60, 32),
    }


@stem("retract_all")
def _(rng):
    factors = [(1, [2, 12, 5]), (122, [1, 7, 7]), (172, [1, 12, 5]), (233, [3, 6, 1])]
    params = rng.standard_normal(252)
    after = params.copy()
    for start, shape in factors:
        factor = near_orthonormal(rng, *shape)
        place = slice(start, start + factor.size)
        params[place], after[place] = factor.ravel(), polar(factor).ravel()
    case = Case("2x12x5-1x7x7-1x12x5-3x6x1-i4-step", {"params": params, "apply": one(1)}, {"params_after": after})
    return double("scipy.linalg.polar", "scipy", "numpy", why=POLAR), {"mixed": case}


@stem("sanitise")
def _(rng):
    def case(config, ranges, max_norm):
        # Large, so that the 1e-6 which PyTorch adds to the norm is below the rounding of f64.
        grads = 1e9 * rng.standard_normal(50)
        parts = [torch.nn.Parameter(torch.zeros(b - a, dtype=torch.float64)) for a, b in ranges]
        for p, (a, b) in zip(parts, ranges):
            p.grad = torch.tensor(grads[a:b])
        norm = torch.nn.utils.clip_grad_norm_(parts, max_norm)
        scale = parts[0].grad[0] / grads[ranges[0][0]]
        inputs = {"grads": grads, "loss": rng.standard_normal(3), "counters": np.array([7.0, 2.0, 1.0, 0.0])}
        return Case(config, inputs, {"norm": norm.reshape(1).numpy(), "scale": scale.reshape(1).numpy()})

    return double("torch.nn.utils.clip_grad_norm_", *TORCH), {
        "ranges": case("p50-clip30to47and3to20-max1e0-normal", [(30, 47), (3, 20)], 1.0),
        "all": case("p50-clip0to50-max1e3-normal", [(0, 50)], 1e3),
    }


@stem("ema")
def _(rng):
    def case(config, ranges, momentum):
        teacher, online = rng.standard_normal((2, 40))
        after = torch.tensor(teacher)
        get_ema_multi_avg_fn(momentum)(
            [after[a:b] for a, b in ranges], [torch.tensor(online[a:b]) for a, b in ranges], 1
        )
        return Case(config, {"teacher": teacher, "online": online, "apply": one(1)}, {"teacher_after": after.numpy()})

    return double("torch.optim.swa_utils.get_ema_multi_avg_fn", *TORCH), {
        "ranges": case("p40-22to38and3to17-mu0.9-apart", [(22, 38), (3, 17)], 0.9),
        "all": case("p40-0to40-mu0.999-apart", [(0, 40)], 0.999),
    }


@stem("record")
def _(rng):
    def case(config, rows, lengths, step):
        first, second = [rng.standard_normal(n) for n in lengths[:2]]
        count = rng.integers(0, 1 << 24, lengths[2]).astype(np.float64)
        ring = rng.standard_normal((rows, sum(lengths)))
        row = torch.cat([torch.tensor(x) for x in [first, second, count]])
        after = torch.tensor(ring).index_copy(0, torch.tensor([step % rows]), row.unsqueeze(0))
        inputs = {"first": first, "second": second, "count": count, "step": one(step), "ring": ring}
        return Case(config, inputs, {"ring_after": after.numpy()})

    return double("torch.Tensor.index_copy", *TORCH, tol=0.0, why="values are copied"), {
        "start": case("r5-n3-1-4-step2-normal", 5, [3, 1, 4], 2),
        "around": case("r5-n3-1-4-step5-normal", 5, [3, 1, 4], 5),
        "last": case("r6-n2-1-2-step11-normal", 6, [2, 1, 2], 11),
    }


def write(path, origin, cases):
    """Writes the file so that equal values give equal bytes, which the package's own writer does not promise."""
    text = {"generator": "golden/generate.py", "seed": str(SEED)}
    tensors = {}
    origins = {"": origin} | {f".{name}": case.origin for name, case in cases.items() if case.origin}
    for suffix, o in origins.items():
        versions = ", ".join(f"{package} {metadata.version(package)}" for package in o.packages)
        text |= {
            f"source{suffix}": o.source,
            f"version{suffix}": versions,
            f"tol{suffix}": repr(o.tol),
            f"why{suffix}": o.why,
        }
    for name, case in cases.items():
        text[f"config.{name}"] = case.config
        for part, arrays in [("in", case.inputs), ("up", case.upstream), ("out", case.outputs), ("grad", case.grads)]:
            tensors |= {f"{name}/{part}/{tensor}": np.ascontiguousarray(x) for tensor, x in arrays.items()}
    header, data = {"__metadata__": dict(sorted(text.items()))}, b""
    for name, x in sorted(tensors.items()):
        kind = {np.dtype("<f8"): "F64", np.dtype("<f4"): "F32"}[x.dtype]
        if "/in/" not in name and not np.isfinite(x).all():
            raise ValueError(f"{path.name}: {name} is not finite")
        header[name] = {"dtype": kind, "shape": list(x.shape), "data_offsets": [len(data), len(data) + x.nbytes]}
        data += x.tobytes()
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)


def main():
    parser = argparse.ArgumentParser(description="Writes golden files from other people's implementations.")
    parser.add_argument("out", type=Path, help="the folder to write into")
    parser.add_argument("stems", nargs="*", help="the operations; all of them by default")
    args = parser.parse_args()
    for name in args.stems or sorted(STEMS):
        if name not in STEMS:
            print(f"{name}: nothing to compare with", file=sys.stderr)
            continue
        # Every stem has a stream of its own, so that another stem's cases move none of its numbers.
        origin, cases = STEMS[name](np.random.default_rng([SEED, zlib.crc32(name.encode())]))
        write(args.out / f"{name}.safetensors", origin, cases)
        print(f"{name}: {len(cases)} cases", file=sys.stderr)


if __name__ == "__main__":
    main()
