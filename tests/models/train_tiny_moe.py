#!/usr/bin/env python3
"""Train a tiny mixture-of-experts language model from scratch with PyTorch and transformers.

The result is a real (if small) model: about 6 million parameters, trained on code, English, mathematics and
Chinese, so that perplexity, routing statistics and expert coverage mean something. Two architectures:

    minimax_m2    MiniMaxM2ForCausalLM: 6 MoE layers, grouped-query attention with query/key norms, sigmoid router
    deepseek_v3   DeepseekV3ForCausalLM: 1 dense and 5 MoE layers, latent attention, group-limited router,
                  one shared expert

Both have 16 routed experts, two of them per token, balanced without an auxiliary loss: after each step the
router's e_score_correction_bias moves a little against the experts' load error.

Data: a folder with train/KIND.jsonl and heldout/KIND.jsonl for the four kinds in MIX below, one {"text": ...} per
line. The first run trains the tokenizer (DATA/tokenizer) and stores the token streams (DATA/tokens.npz).

    python train_tiny_moe.py --data DATA --prepare                                   # tokenizer and tokens only
    python train_tiny_moe.py --data DATA --arch minimax_m2 --out tiny-minimax-m2 --steps 15000 --compile

The output folder holds a bf16 checkpoint in the original naming (one tensor per expert; the correction bias in
fp32), the tokenizer, and train_log.json. Needs torch >= 2.9 and transformers >= 5.17.
"""

import argparse
import json
import math
import shutil
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

VOCAB_SIZE = 4096
PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"  # ids 0, 1, 2

# Share of each kind of text in every batch, and the most bytes of it that the tokenizer is trained on.
MIX = {"code": 0.40, "english": 0.35, "math": 0.10, "chinese": 0.15}
TOKENIZER_BYTES = {"code": 12e6, "english": 12e6, "math": 4e6, "chinese": 9e6}

# Turns are written as they stand in the dialogues of the training text.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ 'User: ' + m['content'] + '\\n' }}"
    "{% elif m['role'] == 'assistant' %}{{ 'Assistant: ' + m['content'] + '\\n' }}"
    "{% else %}{{ m['content'] + '\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


# ------------------------------------------------------------------------------------------------ data


def read_texts(path):
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["text"]


def build_tokenizer(data):
    """Train a byte-level BPE tokenizer on a part of the training text and save it as DATA/tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    def sample():
        for kind, limit in TOKENIZER_BYTES.items():
            size = 0
            for text in read_texts(data / "train" / f"{kind}.jsonl"):
                yield text
                size += len(text.encode())
                if size > limit:
                    break

    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator(
        sample(),
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=[PAD, BOS, EOS],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tok.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, tok.token_to_id(BOS))]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tok,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(data / "tokenizer", save_jinja_files=False)  # the template goes into tokenizer_config.json
    # Name the class as every version of transformers knows it.
    path = data / "tokenizer" / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    config.pop("backend", None)
    path.write_text(json.dumps(config, indent=2) + "\n")


def build_tokens(data):
    """Tokenize all text; DATA/tokens.npz gets one uint16 stream per split and kind: bos document eos bos ..."""
    from tokenizers import Tokenizer

    tok = Tokenizer.from_file(str(data / "tokenizer" / "tokenizer.json"))
    bos, eos = tok.token_to_id(BOS), tok.token_to_id(EOS)
    streams = {}
    for split in ("train", "heldout"):
        for kind in MIX:
            texts, parts = list(read_texts(data / split / f"{kind}.jsonl")), []
            for i in range(0, len(texts), 256):
                batch = tok.encode_batch(texts[i : i + 256], add_special_tokens=False)
                parts.extend(np.array([bos, *enc.ids, eos], dtype=np.uint16) for enc in batch)
            streams[f"{split}_{kind}"] = np.concatenate(parts)
            size = sum(len(t.encode()) for t in texts)
            count = len(streams[f"{split}_{kind}"])
            print(
                f"{split:8s} {kind:8s} {size / 1e6:7.2f} MB {count / 1e6:7.3f} M tokens {size / count:.2f} bytes/token"
            )
    np.savez_compressed(data / "tokens.npz", **streams)


def load_tokens(data, device):
    if not (data / "tokenizer").exists():
        build_tokenizer(data)
    if not (data / "tokens.npz").exists():
        build_tokens(data)
    with np.load(data / "tokens.npz") as z:
        return {name: torch.from_numpy(z[name].astype(np.int32)).to(device) for name in z.files}


class Batches:
    """Random windows of the training streams, each kind with its share of every batch."""

    def __init__(self, tokens, batch, seq, seed, device):
        self.seq, self.streams = seq, {kind: tokens[f"train_{kind}"] for kind in MIX}
        self.gen = torch.Generator(device=device).manual_seed(seed)
        self.counts = {kind: round(share * batch) for kind, share in MIX.items()}
        self.counts["code"] += batch - sum(self.counts.values())
        self.window = torch.arange(seq + 1, device=device)

    def next(self):
        rows = []
        for kind, n in self.counts.items():
            stream = self.streams[kind]
            start = torch.randint(len(stream) - self.seq - 1, (n, 1), generator=self.gen, device=stream.device)
            rows.append(stream[start + self.window])
        rows = torch.cat(rows).long()
        return rows[:, :-1], rows[:, 1:]


# ----------------------------------------------------------------------------------------------- model


def build_model(arch):
    """A freshly initialised model in fp32, with the extra config keys that inference engines read."""
    common = dict(
        vocab_size=VOCAB_SIZE,
        hidden_size=160,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_experts_per_tok=2,
        max_position_embeddings=2048,
        initializer_range=0.04,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    if arch == "minimax_m2":
        from transformers import MiniMaxM2Config, MiniMaxM2ForCausalLM

        config = MiniMaxM2Config(
            **common,
            num_key_value_heads=2,
            head_dim=32,
            num_local_experts=16,
            intermediate_size=96,
            # Half of each head is rotated, as in the full-size model, which states it as rotary_dim.
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            rotary_dim=16,
            scoring_func="sigmoid",
            use_routing_bias=True,
            use_qk_norm=True,
            qk_norm_type="per_layer",
            shared_intermediate_size=0,
            num_mtp_modules=0,
        )
        return MiniMaxM2ForCausalLM(config)

    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        **common,
        num_key_value_heads=4,
        first_k_dense_replace=1,
        intermediate_size=384,
        moe_intermediate_size=96,
        n_routed_experts=16,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=1.5,
        q_lora_rank=64,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        num_nextn_predict_layers=0,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        moe_layer_freq=1,
    )
    return DeepseekV3ForCausalLM(config)


class LoadBalancer:
    """Balancing without an auxiliary loss: counts each expert's tokens and shifts the router's selection bias.

    An expert with more than (1 + tolerance) times its even share gets a lower bias, one with less than
    (1 - tolerance) a higher one, by `rate` per step. Within the tolerance the router is left alone, so every
    expert is used, but not all of them equally. The bias only selects experts; it does not weight their outputs.
    """

    def __init__(self, model, tolerance):
        self.tolerance, self.gates, self.biases = tolerance, [], []
        for layer in model.model.layers:
            gate = getattr(layer.mlp, "gate", None)
            if gate is None:  # a dense layer
                continue
            # The bias belongs to the router in one architecture and to the MoE block in the other.
            bias = getattr(gate, "e_score_correction_bias", None)
            bias = layer.mlp.e_score_correction_bias if bias is None else bias
            gate.load = torch.zeros(len(bias), device=bias.device)
            gate.expert_ids = torch.arange(len(bias), device=bias.device)
            gate.register_forward_hook(self._count)
            self.gates.append(gate)
            self.biases.append(bias)

    @staticmethod
    def _count(gate, _args, out):
        if gate.training:
            chosen = out[2].detach()  # (tokens, experts per token)
            gate.load += (chosen.unsqueeze(-1) == gate.expert_ids).sum((0, 1))

    def shares(self):
        """Each expert's part of the tokens since the last update, one row per MoE layer."""
        load = torch.stack([gate.load for gate in self.gates])
        return load / load.sum(1, keepdim=True).clamp(min=1)

    @torch.no_grad()
    def update(self, rate):
        error = self.shares() * len(self.biases[0]) - 1
        step = error.sign() * (error.abs() > self.tolerance)
        for gate, bias, delta in zip(self.gates, self.biases, step, strict=True):
            bias -= rate * delta
            gate.load.zero_()


# -------------------------------------------------------------------------------------------- training


def head_loss(weight, hidden, targets, reduction):
    logits = F.linear(hidden, weight).flatten(0, 1).float()
    return F.cross_entropy(logits, targets.flatten(), reduction=reduction)


def token_loss(model, inputs, targets, reduction="mean", head=head_loss):
    hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
    return head(model.lm_head.weight, hidden, targets, reduction)


@torch.no_grad()
def evaluate(model, tokens, seq, rows=64):
    """Mean loss per token on each held-out stream, cut into windows of seq tokens."""
    model.eval()
    losses = {}
    with torch.compiler.set_stance("force_eager"):
        for kind in MIX:
            stream = tokens[f"heldout_{kind}"].long()
            n = (len(stream) - 1) // seq
            inputs, targets = stream[: n * seq].view(n, seq), stream[1 : n * seq + 1].view(n, seq)
            total = sum(
                token_loss(model, inputs[i : i + rows], targets[i : i + rows], "sum").item() for i in range(0, n, rows)
            )
            losses[kind] = total / (n * seq)
    model.train()
    return losses


def train(args):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    tokens = load_tokens(args.data, device)
    batches = Batches(tokens, args.batch, args.seq, args.seed, device)

    model = build_model(args.arch).to(device)
    model.set_experts_implementation("grouped_mm")  # one grouped matrix product in place of a loop over experts
    # The optimizer works on fp32 copies; the model itself runs in bf16. Buffers (rotary frequencies, correction
    # bias) stay in fp32, which is why the parameters are cast one by one.
    params = list(model.parameters())
    master = [p.detach().clone().requires_grad_() for p in params]
    for m, p in zip(master, params, strict=True):
        m.grad = torch.zeros_like(m)
        p.data = p.data.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    optimizer = torch.optim.AdamW(
        [
            {"params": [m for m in master if m.ndim > 1], "weight_decay": args.weight_decay},
            {"params": [m for m in master if m.ndim == 1], "weight_decay": 0.0},
        ],
        lr=args.lr,
        betas=(0.9, 0.95),
        fused=device == "cuda",
    )
    balancer = LoadBalancer(model, args.balance_tolerance)
    head = head_loss
    if args.compile:  # layer by layer, so that the equal layers share one compilation
        head = torch.compile(head_loss)
        for layer in model.model.layers:
            layer.compile()
    print(f"{args.arch}: {sum(p.numel() for p in params) / 1e6:.2f} M parameters on {device}", flush=True)

    model.train()
    log, begin, window, step, progress = [], time.time(), time.time(), 0, 0.0
    while progress < 1:
        inputs, targets = batches.next()
        loss = token_loss(model, inputs, targets, head=head)
        loss.backward()
        torch._foreach_copy_([m.grad for m in master], [p.grad for p in params])
        norm = torch.nn.utils.clip_grad_norm_(master, args.clip)

        # Linear warm-up, then a cosine down to 1% of the peak; the end is a number of steps or of minutes.
        warm = min(1.0, (step + 1) / args.warmup)
        decay = 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = args.lr * warm * decay
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(params, master)
        model.zero_grad(set_to_none=True)

        report = (step + 1) % args.log_every == 0
        if report:
            shares = balancer.shares()
            low, high = shares.min().item(), shares.max().item()
        balancer.update(args.balance_rate * decay)
        step += 1
        elapsed = time.time() - begin
        progress = max(step / args.steps if args.steps else 0, elapsed / (60 * args.minutes) if args.minutes else 0)
        if report:
            rate = args.log_every * args.batch * args.seq / (time.time() - window)
            entry = dict(step=step, seconds=round(elapsed, 1), loss=round(loss.item(), 4), norm=round(norm.item(), 3))
            entry.update(min_share=round(low, 4), max_share=round(high, 4), tokens_per_s=round(rate))
            if (step // args.log_every) % args.eval_every == 0:
                entry["heldout"] = {k: round(v, 4) for k, v in evaluate(model, tokens, args.seq).items()}
            log.append(entry)
            print(json.dumps(entry), flush=True)
            window = time.time()

    final = evaluate(model, tokens, args.seq)
    print("final held-out loss", {k: round(v, 4) for k, v in final.items()})
    summary = dict(
        arch=args.arch,
        steps=step,
        tokens=step * args.batch * args.seq,
        seconds=round(time.time() - begin, 1),
        settings={k: str(v) for k, v in vars(args).items() if k not in ("data", "out")},
        heldout_loss=final,
        log=log,
    )
    save(model, args, summary)


# ---------------------------------------------------------------------------------------------- saving


def save(model, args, summary):
    """Write the checkpoint in the original naming and check names and types in the file."""
    from safetensors import safe_open

    model.eval().cpu()
    model.generation_config.update(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model.save_pretrained(args.out, max_shard_size="16MB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(args.data / "tokenizer" / name, args.out / name)
    (args.out / "train_log.json").write_text(json.dumps(summary, indent=1) + "\n")

    if args.arch == "minimax_m2":
        bias = "model.layers.1.block_sparse_moe.e_score_correction_bias"
        expected = [
            "model.layers.1.block_sparse_moe.gate.weight",
            "model.layers.1.block_sparse_moe.experts.15.w1.weight",
        ]
    else:
        bias = "model.layers.1.mlp.gate.e_score_correction_bias"
        expected = ["model.layers.1.mlp.gate.weight", "model.layers.1.mlp.experts.15.gate_proj.weight"]
    with safe_open(args.out / "model.safetensors", "pt") as f:
        names = set(f.keys())
        missing = [name for name in [bias, *expected] if name not in names]
        if missing:
            raise SystemExit(f"not in the checkpoint: {missing}")
        if f.get_tensor(bias).dtype != torch.float32 or f.get_tensor(expected[0]).dtype != torch.bfloat16:
            raise SystemExit("the correction bias must be fp32 and the weights bf16")
    print(f"saved {len(names)} tensors, {(args.out / 'model.safetensors').stat().st_size / 2**20:.2f} MiB")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--arch", choices=["minimax_m2", "deepseek_v3"])
    p.add_argument("--data", type=Path, required=True, help="folder with train/ and heldout/")
    p.add_argument("--out", type=Path, help="folder for the checkpoint")
    p.add_argument("--prepare", action="store_true", help="only make the tokenizer and the token streams")
    p.add_argument("--steps", type=int, default=0, help="number of steps (0: as many as --minutes allows)")
    p.add_argument("--minutes", type=float, default=0, help="stop, with the schedule at its end, after this time")
    p.add_argument("--batch", type=int, default=128, help="sequences per step")
    p.add_argument("--seq", type=int, default=512, help="tokens per sequence")
    p.add_argument("--lr", type=float, default=8e-3)
    p.add_argument("--warmup", type=int, default=300, help="steps")
    p.add_argument("--weight-decay", type=float, default=0.1)
    p.add_argument("--clip", type=float, default=1.0, help="largest gradient norm")
    p.add_argument("--balance-rate", type=float, default=1e-3, help="change of the correction bias per step")
    p.add_argument("--balance-tolerance", type=float, default=0.4, help="load error that is left alone")
    p.add_argument("--compile", action="store_true", help="compile the decoder layers (faster on a GPU)")
    p.add_argument("--log-every", type=int, default=100)
    p.add_argument("--eval-every", type=int, default=5, help="held-out loss at every n-th log line")
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()
    if args.prepare:
        load_tokens(args.data, "cpu")
    elif args.arch and args.out and (args.steps or args.minutes):
        args.out.mkdir(parents=True, exist_ok=True)
        train(args)
    else:
        p.error("give --arch, --out and --steps or --minutes, or --prepare")


if __name__ == "__main__":
    main()
