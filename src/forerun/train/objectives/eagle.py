"""EAGLE-3 by training-time test (Li et al. 2025, arXiv 2503.01840): drafting itself is unrolled.

Step s of the unrolling is the s-th token drafted behind row t, fed with what the target wrote:

    fed       state of (t, s - 1); s = 0: the taps of token t     embedding of token t + 1 + s
    stands    at position t + s
    sees      the rows 0 ... t of step 0 and its own of the steps 1 ... s
    learns    the target's law of token t + 2 + s

These are the keys and positions of drafting, so the logits are those of drafting too. A row counts
if the assistant wrote all of the tokens t + 1 ... t + 2 + s: the engine drafts nowhere else.

B sequences, R rows, N rows without order, M rows that draft (anchors), S steps, C hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from forerun.config import Settings
from forerun.errors import ConfigError
from forerun.interop import eagle
from forerun.interop.layer_numbers import layer_numbers
from forerun.models.heads.eagle import Eagle3, Eagle3Settings, default_taps
from forerun.models.heads.layers import Size
from forerun.models.hub import LoadedModel
from forerun.train.capture import Batch
from forerun.train.losses import Head, soft_cross_entropy
from forerun.train.objectives.base import Loss, Objective, compute_dtype, no_loss
from forerun.train.objectives.unroll import Plan, Unrolled
from forerun.train.source import Source, source
from forerun.train.vocabulary import Vocabulary

SMALL = 0.1  # weights for the embedding half of attention's input, over 1 / sqrt(width)


class EagleOptions(Settings):
    """How an EAGLE-3 draft is built and unrolled.

    taps: boundaries of the target; None: those that published drafts read. unroll: tokens drafted
    in training. step_weight: of a step against the one before. train_head: the output matrix, too;
    otherwise it stays the target's rows. norm_output, fc_norm, norm_before_fc: EAGLE-3.1.
    """

    title = "eagle3"

    taps: tuple[int, ...] | None = None
    layers: Size = 1
    intermediate_size: Size | None = None
    unroll: Size = 3
    step_weight: Annotated[float, Field(gt=0, le=1)] = 0.8
    train_head: bool = False
    norm_output: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False


class Eagle3Objective(Objective):
    """Soft cross-entropy of every step over the draft vocabulary."""

    name = "eagle3"
    settings = EagleOptions
    defaults: ClassVar[Mapping[str, Any]] = {"lr": 1.5e-3}
    network: Eagle3

    def __init__(
        self,
        settings: Settings,
        model: LoadedModel,
        vocabulary: Vocabulary,
        generator: torch.Generator,
    ) -> None:
        super().__init__(settings, model, vocabulary, generator)
        assert isinstance(settings, EagleOptions)
        self.options = settings
        self.ahead = settings.unroll
        start = source(model)
        self.network = Eagle3(_settings(settings, start, vocabulary))
        if problems := eagle.misfits(self.network.settings, model.target.info):
            raise ConfigError(f"{problems[0]}, or as taps in the recipe")
        assert self.network.settings.taps
        self.taps = self.network.settings.taps
        device = model.target.info.device
        _start(self.network, start, self._teacher_head.weight_UC, vocabulary, generator)
        self.network.to(device)
        assert self.network.lm_head is not None
        self.network.lm_head.weight.requires_grad_(settings.train_head)
        steps_S = torch.arange(settings.unroll, device=device)
        self._step_weights_S1 = (settings.step_weight**steps_S)[:, None]

    def loss(self, batch: Batch, generator: torch.Generator) -> Loss:
        plan = Plan.of(batch.supervised_BR)
        anchors = plan.anchors
        if not len(anchors):
            return no_loss(self.network, self.options.unroll)
        # All predictions of one token beside each other: that of step s was made s rows above.
        aligned = [states_MC.roll(s, 0) for s, states_MC in enumerate(self.unrolled(batch, plan))]
        states_SMC = torch.stack(aligned)
        made_SM = torch.stack([anchors.run_on(s) for s in range(len(aligned))])
        labels_M = self._known_V[anchors.tokens(batch, 2)]
        learned_SM = made_SM & (labels_M >= 0)
        count = made_SM[0].sum()
        found = soft_cross_entropy(
            states_SMC,
            self._head(states_SMC.dtype),
            batch.final_BRC[anchors.sequence_N, anchors.row_N + 1].to(states_SMC.dtype),
            self._teacher(states_SMC.dtype),
            learned_SM * self._step_weights_S1 / count,
            labels_M,
        )
        return Loss(
            found.total,
            count,
            (found.loss_SN * learned_SM).sum(-1),
            (found.hits_SN & made_SM).sum(-1).float(),
            made_SM.sum(-1).float(),
        )

    def unrolled(self, batch: Batch, plan: Plan) -> Iterator[Tensor]:
        """Per step, what the output matrix reads of the anchors' rows, [M, C]."""
        memory = Unrolled(plan)
        dtype = compute_dtype(batch.tokens_BR.device)
        features_NF = batch.taps_BRTC[plan.context.sequence_N, plan.context.row_N].flatten(1)
        hidden_1NC = self.network.fuse(features_NF[None].to(dtype))
        for s in range(self.options.unroll):
            rows = plan.anchors if s else plan.context
            embedded_NC = self.target.embed(rows.tokens(batch, 1 + s), scaled=False).to(dtype)
            hidden_1NC = self.network(hidden_1NC, embedded_NC[None], (rows.row_N + s)[None], memory)
            if s == 0:
                hidden_1NC = hidden_1NC[:, plan.place_M]
            yield self.network.readout(hidden_1NC)[0]

    def save(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        with torch.device("meta"):
            copy = Eagle3(self.network.settings)
        dtype = self.target.info.dtype
        # A buffer of numbers keeps its type.
        typed = {n: w.to(dtype) if w.is_floating_point() else w for n, w in weights.items()}
        copy.load_state_dict(typed, assign=True)
        layout = "speculators" if self.network.settings.qk_norm else "vllm"
        eagle.export(copy, layout, folder, self.model.name)

    def spec(self, folder: Path) -> str:
        return f"eagle3:{folder},k={self.options.unroll}"

    def _head(self, dtype: torch.dtype) -> Head:
        """The draft's output matrix; while it is the target's, it is laid out only once."""
        if not self.options.train_head:
            return self._teacher(dtype)
        assert self.network.lm_head is not None
        return Head(self.network.lm_head.weight.to(dtype))

    def _teacher(self, dtype: torch.dtype) -> Head:
        if self._teacher_head.weight_UC.dtype is not dtype:
            self._teacher_head = Head(self._teacher_head.weight_UC.to(dtype))
        return self._teacher_head


def _settings(options: EagleOptions, start: Source, vocabulary: Vocabulary) -> Eagle3Settings:
    """A layer like those of the target."""
    numbers = start.numbers
    shared = layer_numbers(numbers)
    return Eagle3Settings(
        **{
            **shared,
            "layers": options.layers,
            "intermediate_size": options.intermediate_size or numbers.intermediate_size,
            "attention_bias": numbers.qkv_bias,
            "o_bias": None if numbers.o_bias == numbers.qkv_bias else numbers.o_bias,
            "mlp_bias": numbers.mlp_bias,
            "qk_norm": numbers.qk_norm,
            "target_hidden_size": numbers.hidden_size,
            "taps": options.taps or default_taps(numbers.layers),
            "tap_count": len(options.taps or default_taps(numbers.layers)),
            "draft_vocab_size": len(vocabulary),
            "norm_output": options.norm_output,
            "fc_norm": options.fc_norm,
            "norm_before_fc": options.norm_before_fc,
        }
    )


def _start(
    network: Eagle3, start: Source, rows_UC: Tensor, vocabulary: Vocabulary, noise: torch.Generator
) -> None:
    """Begin as the target's last layer: it is fed the last tap and, at first, ignores the others.

    Further layers, and an MLP of another width, begin at random.
    """
    for parameter in network.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=SMALL * parameter.shape[1] ** -0.5, generator=noise)
    width = network.settings.hidden_size
    network.fc.weight.data.zero_()
    network.fc.weight.data[:, -width:] = torch.eye(width)
    own, last = "layers.0", start.last_layer
    for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
        name = f"self_attn.{part}"
        first = 0 if part == "o_proj" else width  # the others read the embedding, then the state
        start.start_linear(network, f"{own}.{name}", f"{last}.{name}", first)
    if network.settings.intermediate_size == start.numbers.intermediate_size:
        for part in ("gate_proj", "up_proj", "down_proj"):
            start.start_linear(network, f"{own}.mlp.{part}", f"{last}.mlp.{part}")
    start.start_norm(network, f"{own}.hidden_norm", f"{last}.input_layernorm")
    start.start_norm(network, f"{own}.post_attention_layernorm", f"{last}.{start.before_mlp}")
    start.start_norm(network, "norm", "model.norm")
    for part in ("q_norm", "k_norm") if network.settings.qk_norm else ():
        start.start_norm(network, f"{own}.self_attn.{part}", f"{last}.self_attn.{part}")
    assert network.lm_head is not None
    network.lm_head.weight.data.copy_(rows_UC)
    if network.settings.reduced:
        network.d2t = vocabulary.d2t_U
