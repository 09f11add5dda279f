"""The Transformer against torch's own layers, decoding with a cache against decoding without, beam search against trying everything."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

import nofm
from nofm.errors import NofmError
from nofm.tasks.beam import beam_search
from nofm.tasks.transformer import BOS, EOS, PAD, Decoding, Size, Transformer, build_transformer

TINY = {"layers": 2, "width": 16, "hidden": 32, "heads": 2, "dropout": 0.0}


def tiny(vocabulary: int = 11, seed: int = 0, sharpness: float = 1.0, **options) -> Transformer:
    """A small network in float64. `sharpness` > 1 gives it opinions, which random weights lack."""
    torch.manual_seed(seed)
    model = Transformer(vocabulary, Size(**{**TINY, **options})).double().eval()
    with torch.no_grad():
        model.embedding.weight.mul_(sharpness)
    return model


def sentences(*lengths: int, vocabulary: int = 11, seed: int = 1) -> Tensor:
    """Random sources that end with EOS, padded."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.full((len(lengths), max(lengths)), PAD)
    for row, length in zip(rows, lengths, strict=True):
        row[: length - 1] = torch.randint(EOS + 1, vocabulary, (length - 1,), generator=generator)
        row[length - 1] = EOS
    return rows


def targets(rows: int, length: int, vocabulary: int = 11) -> Tensor:
    """What a decoder is given: BOS, then anything."""
    words = torch.randint(EOS + 1, vocabulary, (rows, length - 1), generator=torch.Generator().manual_seed(2))
    return torch.cat((torch.full((rows, 1), BOS), words), 1)


# ---- the network ----


def torch_layer(ours: nn.Module, kind: type[nn.Module], norm_first: bool) -> nn.Module:
    """torch's layer of this kind with our weights."""
    theirs = kind(16, 2, 32, dropout=0.0, norm_first=norm_first, batch_first=True).double().eval()
    attentions = [("self_attn", getattr(ours, "attention", None) or ours.self_attention)]
    if kind is nn.TransformerDecoderLayer:
        attentions.append(("multihead_attn", ours.cross_attention))
    with torch.no_grad():
        for name, mine in attentions:
            into = getattr(theirs, name)
            into.in_proj_weight.copy_(torch.cat([mine.query.weight, mine.key.weight, mine.value.weight]))
            into.in_proj_bias.copy_(torch.cat([mine.query.bias, mine.key.bias, mine.value.bias]))
            into.out_proj.load_state_dict(mine.output.state_dict())
        theirs.linear1.load_state_dict(ours.feed.inner.state_dict())
        theirs.linear2.load_state_dict(ours.feed.outer.state_dict())
        for number, residual in enumerate(ours.residual, start=1):
            getattr(theirs, f"norm{number}").load_state_dict(residual.norm.state_dict())
    return theirs


def randomised(model: Transformer) -> Transformer:
    """Biases and norms with values of their own, so that one in the wrong place shows."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_it_computes_what_torchs_transformer_computes(norm):
    model = randomised(tiny(norm=norm))
    source, target = sentences(3, 7, 5), targets(3, 6)
    mask, pre = source == PAD, norm == "pre"
    with torch.no_grad():
        memory = model.embed(source, 0)
        for layer in model.encoder:
            memory = torch_layer(layer, nn.TransformerEncoderLayer, pre)(memory, src_key_padding_mask=mask)
        memory = model.encoder_norm(memory)
        x = model.embed(target, 0)
        causal = nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)
        for layer in model.decoder:
            x = torch_layer(layer, nn.TransformerDecoderLayer, pre)(x, memory, tgt_mask=causal, memory_key_padding_mask=mask)
        expected = model.decoder_norm(x) @ model.embedding.weight.T
        torch.testing.assert_close(model(source, target), expected, rtol=0, atol=1e-12)


def test_positions_are_the_papers_sinusoids():
    model = tiny(width=8, heads=2)
    angle = [7 / 10_000 ** (2 * i / 8) for i in range(4)]
    expected = torch.tensor([f(torch.tensor(a)) for a in angle for f in (torch.sin, torch.cos)]).double()
    torch.testing.assert_close(model.position_PD[7], expected, rtol=0, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(model.embed(torch.tensor([[5]]), 7)[0, 0], model.embedding.weight[5] * 8**0.5 + model.position_PD[7])


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_token_by_token_with_a_cache_is_the_whole_at_once(norm):
    model, source, target = tiny(norm=norm), sentences(4, 9, 6), targets(3, 8)
    with torch.no_grad():
        writing = Decoding(model, source)
        steps = torch.cat([writing(target[:, t : t + 1]) for t in range(8)], 1)
        torch.testing.assert_close(steps, model(source, target), rtol=0, atol=1e-12)


def test_reordered_rows_go_on_from_where_their_new_prefix_was():
    model, source, target = tiny(), sentences(4, 6), targets(6, 5)
    writing, rows = Decoding(model, source, copies=3), torch.tensor([2, 2, 0, 3, 5, 3])  # within three and three
    with torch.no_grad():
        for t in range(4):
            writing(target[:, t : t + 1])
        writing.reorder(rows)
        expected = model(source.repeat_interleave(3, 0), torch.cat((target[rows, :4], target[:, 4:]), 1))[:, -1:]
        torch.testing.assert_close(writing(target[:, 4:]), expected, rtol=0, atol=1e-12)


def test_neither_padding_nor_later_words_are_seen():
    model, source, target = tiny(), sentences(4, 6), targets(2, 6)
    with torch.no_grad():
        logits = model(source, target)
        padded = model(torch.cat((source, torch.full((2, 5), PAD)), 1), target)
        torch.testing.assert_close(padded, logits, rtol=0, atol=1e-12)
        other = torch.cat((target[:, :4], target[:, 4:].flip(1) + 1), 1) % 11
        torch.testing.assert_close(model(source, other)[:, :4], logits[:, :4], rtol=0, atol=0)
        assert not torch.allclose(model(source, other)[:, 4:], logits[:, 4:])


def test_one_matrix_is_embedding_and_softmax():
    model = tiny()
    assert model.output.weight is model.embedding.weight
    model(sentences(3), targets(1, 3)).sum().backward()
    assert model.embedding.weight.grad[PAD].abs().sum() > 0, "the softmax's share of the gradient"


# What must be counted to get the paper's 63 M -> 31.5 M.
COUNTS = {
    "dense": (None, 63_082_496),
    "linear layers": ("2:4", 41_062_400),
    "embedding and softmax too": ({"embedding": "2:4", "output": "2:4", "*": "2:4"}, 31_590_400),
}


@pytest.mark.parametrize(("pattern", "params"), COUNTS.values(), ids=COUNTS)
def test_parameters_of_transformer_base(pattern, params):
    with torch.device("meta"):
        model = build_transformer("transformer/base", 37_000)
    if pattern is not None:
        nofm.sparsify_(model, pattern)
    sentence = torch.zeros((1, 155), dtype=torch.int64)
    cost = nofm.cost(model, [sentence, sentence])
    assert cost.params_sparse == params
    assert round(cost.macs / 1e9, 1) == 10.2  # the paper's Flops, at this length


def test_all_linear_layers_become_sparse_and_the_softmax_does_not():
    model = build_transformer("transformer/small", 64, layers=1)
    summary = nofm.sparsify_(model, "2:4")
    assert {row.name for row in summary.dense} == {"embedding", "output"}
    assert len(summary.sparse) == (4 + 2) + (8 + 2)


BAD_SIZES = {
    "heads": ({"width": 20, "heads": 8}, "divide into 8 heads"),
    "layers": ({"layers": 0}, "layers must be at least 1, got 0"),
    "dropout": ({"dropout": 1.0}, "dropout must be 0 <= dropout < 1, got 1.0"),
    "norm": ({"norm": "both"}, "'post' or 'pre', got 'both'"),
}


@pytest.mark.parametrize(("options", "message"), BAD_SIZES.values(), ids=BAD_SIZES)
def test_a_bad_size_is_refused(options, message):
    with pytest.raises(NofmError, match=message):
        build_transformer("transformer/small", 100, **options)


def test_other_bad_requests_are_refused():
    with pytest.raises(NofmError, match=r"transformer/huge: there is no such Transformer; there are transformer/base"):
        build_transformer("transformer/huge", 100)
    with pytest.raises(NofmError, match="room for the three special"):
        tiny(vocabulary=3)
    with pytest.raises(NofmError, match="of 9 tokens: this Transformer knows 8 positions"):
        tiny(positions=8)(sentences(9), targets(1, 2))


# ---- beam search ----


def search(model: Transformer, source: Tensor, limit: list[int], beams: int, alpha: float):
    with torch.no_grad():
        return model(source, copies=beams, search=lambda writer: beam_search(writer, torch.tensor(limit), beams, alpha))


def log_probs(model: Transformer, source_S: Tensor, hypotheses: list[list[int]]) -> list[float]:
    """Of whole hypotheses, without a cache, a beam or a batch of sources."""
    found = []
    for hypothesis in hypotheses:
        with torch.no_grad():
            logits = model(source_S[None], torch.tensor([[BOS, *hypothesis[:-1]]]))[0].log_softmax(1)
        found.append(sum(float(logits[t, token]) for t, token in enumerate(hypothesis)))
    return found


def without_padding(row: Tensor) -> list[int]:
    return [token for token in row.tolist() if token != PAD]


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.5])
def test_a_beam_with_room_for_everything_finds_the_best_of_everything(alpha):
    lengths = set()
    for seed in range(3):
        model = tiny(vocabulary=6, seed=seed, sharpness=3.0, layers=1)
        source, limits = sentences(3, 5, 2, vocabulary=6, seed=seed), [4, 2, 3]
        found = search(model, source, limits, beams=40, alpha=alpha)
        for row, limit in enumerate(limits):
            words = range(EOS + 1, 6)
            everything = [[*w, EOS] for length in range(limit) for w in itertools.product(words, repeat=length)]
            scores = [p / ((5 + len(h)) / 6) ** alpha for p, h in zip(log_probs(model, source[row], everything), everything, strict=True)]
            best = max(range(len(everything)), key=scores.__getitem__)
            assert without_padding(found.token_BL[row]) == everything[best]
            assert float(found.score_B[row]) == pytest.approx(scores[best], abs=1e-5)
            lengths.add(len(everything[best]))
    assert len(lengths) > 1, "the best are not all of one length, or the test says little"


def test_one_beam_is_greedy():
    ended = 0
    for seed in range(6):
        model, source, limit = tiny(vocabulary=5, seed=seed, sharpness=0.5), sentences(5, vocabulary=5, seed=seed), 7
        written = [BOS]
        while len(written) <= limit and (len(written) == 1 or written[-1] != EOS):
            with torch.no_grad():
                logits = model(source, torch.tensor([written]))[0, -1]
            logits[[PAD, BOS]] = -torch.inf
            written.append(EOS if len(written) == limit else int(logits.argmax()))
        assert without_padding(search(model, source, [limit], 1, 0.6).token_BL[0]) == written[1:]
        ended += len(written) <= limit
    assert 0 < ended < 6, "some end by themselves and some at the limit"


@pytest.mark.parametrize("beams", [1, 4])
def test_sentences_do_not_see_each_other(beams):
    model, source = tiny(sharpness=2.0), sentences(3, 8, 5, 2)
    limits = [6, 12, 3, 9]
    together = search(model, source, limits, beams, 0.6)
    for row, limit in enumerate(limits):
        alone = search(model, source[row : row + 1], [limit], beams, 0.6)
        assert without_padding(alone.token_BL[0]) == without_padding(together.token_BL[row])
        hypothesis = without_padding(together.token_BL[row])
        assert len(hypothesis) <= limit
        assert hypothesis[-1] == EOS
        assert EOS not in hypothesis[:-1]
        assert BOS not in hypothesis
        assert float(together.log_prob_B[row]) == pytest.approx(log_probs(model, source[row], [hypothesis])[0], abs=1e-5)


@dataclass
class Chain:
    """A language whose next word depends on the last one only: probability_VV[last, next]."""

    probability_VV: Tensor
    calls: int = 0
    orders: list[Tensor] = field(default_factory=list)

    def __call__(self, token_BT: Tensor) -> Tensor:
        self.calls += 1
        return self.probability_VV.log()[token_BT]

    def reorder(self, row_B: Tensor) -> None:
        self.orders.append(row_B)


def chain(**follows: dict[str, float]) -> Chain:
    """Words are p, B, E (special) and a to c; what is not said follows with probability 0."""
    words = "pBEabc"
    table = torch.zeros(6, 6)
    for word, nexts in follows.items():
        for following, probability in nexts.items():
            table[words.index(word), words.index(following)] = probability
    return Chain(table)


def test_a_length_penalty_prefers_the_longer():
    # "a" has log-probability -0.51 and with its end 2 tokens, "b c" -0.92 and 3: they are divided by 7/6 and 8/6 to the power of alpha.
    language = {"B": {"a": 0.6, "b": 0.4}, "a": {"E": 1.0}, "b": {"c": 1.0}, "c": {"E": 1.0}}
    for alpha, expected in ((0.0, [3, EOS]), (1.0, [3, EOS]), (6.0, [4, 5, EOS])):
        found = beam_search(chain(**language), torch.tensor([9]), beams=2, alpha=alpha)
        assert without_padding(found.token_BL[0]) == expected


def test_a_better_beginning_does_not_hide_a_better_whole():
    language = {"B": {"a": 0.6, "b": 0.4}, "a": {"c": 0.5, "b": 0.5}, "c": {"E": 1.0}, "b": {"E": 1.0}}
    greedy, beam = (beam_search(chain(**language), torch.tensor([9]), beams, 0.0) for beams in (1, 2))
    assert float(greedy.log_prob_B) == pytest.approx(torch.tensor(0.3).log().item())
    assert float(beam.log_prob_B) == pytest.approx(torch.tensor(0.4).log().item())


def test_the_search_ends_when_all_have_ended():
    language = chain(B={"a": 0.9, "E": 0.1}, a={"E": 1.0})
    found = beam_search(language, torch.tensor([50, 30]), beams=2)
    assert language.calls == 2
    assert found.token_BL.tolist() == [[3, EOS]] * 2


def test_a_search_needs_a_beam():
    with pytest.raises(NofmError, match="beams = 0"):
        beam_search(chain(), torch.tensor([3]), 0)
