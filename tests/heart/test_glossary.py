"""The glossary: its symbols against a small attention, its words against the chapters it sends a reader to."""

import re

import numpy as np
import paper_words

from fa2_lab.glossary import GLOSSARY, TERMS
from fa2_lab.paper import LINES, PACKAGE

KERNELS = sorted((PACKAGE / "kernels").rglob("*.py"))
TWINS = sorted((PACKAGE.parent / "notebooks" / "text").rglob("*.py"))


def test_glossary_has_every_symbol_and_both_languages():
    symbols = "Q K V O S P dO dQ dK dV D L m l tau B_r B_c T_r T_c M N d".split()
    words = ["HBM", "SRAM", "shared memory", "warp", "thread block", "SM", "tile", "rescale", "logsumexp"]
    assert {*symbols, *words, "split-K", "split-Q"} <= set(GLOSSARY)
    assert len(GLOSSARY) == len(TERMS), "a term is there twice"
    for term in GLOSSARY.values():
        assert term.english and re.search(r"[\u4e00-\u9fff]", term.chinese), term.name
    assert all(GLOSSARY[name].shape for name in symbols)
    assert GLOSSARY["warp"].chinese == "线程束" and GLOSSARY["SM"].chinese == "流式多处理器"


OTHER_FORMS = dict(l="ell", recompute="recompu", pipelining="pipelined")
OTHER_FORMS |= {"bulk copy": "bulk copies", "register spill": "spill"}


def test_a_term_stands_where_the_glossary_sends_its_reader():
    """In the text of that chapter, or in the file of that rung; only padding is a word of the calls alone."""
    chapters = {
        path.name.split("_")[0]: path.read_text(encoding="utf-8") for path in TWINS if path.parent.name == "text"
    }
    rungs = {
        f"rung {path.name[1:3]}": path.read_text(encoding="utf-8") for path in KERNELS if path.parent.name == "ladder"
    }
    assert [term.name for term in TERMS if not term.explained] == ["padding"]
    for term in TERMS:
        if term.explained:
            word = OTHER_FORMS.get(term.name, term.name)
            text = " ".join((chapters | rungs)[term.explained].replace("\n# ", " ").split())
            assert re.search(rf"(?<![a-zA-Z]){re.escape(word)}", text, re.IGNORECASE if len(word) > 3 else 0), term


def test_the_glossary_knows_the_words_of_the_map_and_of_the_ladder():
    words = (
        "L2, DRAM, FP32 unit, special function unit, on chip, request, program, warpgroup, base 2, pipelining, stage"
    )
    words += ", bulk copy, wgmma, ring, producer, consumer, overlap, persistent, tile scheduler, ping-pong, mailbox"
    assert set(words.split(", ")) <= set(GLOSSARY)


def test_words_of_the_later_chapters_name_the_picture_that_shows_them():
    shown = {term.name: term.picture for term in TERMS if term.picture}
    figures = PACKAGE.parent / "figures"
    assert all((figures / f"{picture}.svg").is_file() for picture in shown.values()), shown
    words = "roofline, bulk copy, wgmma, ring, producer, consumer, overlap, persistent, tile scheduler, ping-pong, part"
    words += ", stream-K, rank, shard, zigzag, interval, window, packed, sink, lane, swizzle, bank conflict"
    assert set(words.split(", ")) <= set(shown)


def test_what_the_glossary_says_of_a_symbol_holds():
    """Shapes and formulas, on a small attention computed here."""
    draw = np.random.default_rng(3).standard_normal
    sizes = dict(N_q=7, N_k=10, d=3, B_r=2, B_c=4)
    Q, K, V, dO = (draw((n, 3)) for n in (7, 10, 10, 7))
    tau = 3**-0.5
    S = tau * Q @ K.T
    m, L = S.max(axis=1), np.log(np.exp(S).sum(axis=1))
    P = np.exp(S - L[:, None])
    O, dP = P @ V, dO @ V.T
    D = (P * dP).sum(axis=1)
    dS = P * (dP - D[:, None])
    tensors = dict(
        Q=Q, K=K, V=V, dO=dO, S=S, P=P, O=O, dP=dP, D=D, dS=dS, m=m, L=L, l=np.exp(S - m[:, None]).sum(axis=1)
    )
    tensors |= dict(dQ=tau * dS @ K, dK=tau * dS.T @ Q, dV=P.T @ dO, tau=tau, T_r=4, T_c=3) | sizes
    for name, x in ((name, tensors[name]) for name in set(tensors) & set(GLOSSARY)):
        shape = GLOSSARY[name].shape
        letters = [] if shape == "number" else [letter for letter in shape.strip("()").split(", ") if letter.strip(",")]
        assert np.shape(x) == tuple(sizes[letter.strip(",")] for letter in letters), (name, shape)
    for name, formula in {
        "S": "τ Q Kᵀ",
        "O": "P V",
        "dS": "P ∘ (dP − D)",
        "dP": "dO Vᵀ",
        "D": "rowsum(dO ∘ O) = rowsum(P ∘ dP)",
        "L": "P = exp(S − L)",
        "l": "rowsum(exp(S − m))",
        "T_r": "⌈N_q / B_r⌉",
        "T_c": "⌈N_k / B_c⌉",
    }.items():
        assert formula in GLOSSARY[name].english
        left, right = formula.split(" = ") if " = " in formula else (name, formula)
        assert paper_words.close(*(paper_words.value_of(side, tensors) for side in (left, right))), name
    assert "exp(m_old − m_new)" in GLOSSARY["alpha"].english and GLOSSARY["alpha"].shape == "(B_r,)"
    for name in ("dQ", "dK", "dV", "dO"):
        assert GLOSSARY[name].english.startswith(f"gradient of the loss with respect to {name[1]}")


def test_a_chinese_word_stands_for_one_english_word():
    """But for L and the logsumexp that it is."""
    chinese = [term.chinese for term in TERMS if term.name != "logsumexp"]
    assert len(set(chinese)) == len(chinese)
    assert [GLOSSARY[name].chinese for name in ("tile", "thread", "merge", "padding", "rescale", "head", "decode")] == [
        *("分块", "线程", "合并", "填充", "重新缩放", "注意力头", "逐词解码")
    ]


def test_glossary_knows_the_letters_that_the_lines_use():
    letters = set(re.findall(r"\b(?:d?[QKVOPS]|[DLMN]|[BT]_[rc])\b", " ".join(line.text for _, line in LINES.values())))
    assert {"Q", "dQ", "B_r", "T_c", "D", "L"} <= letters and letters <= set(GLOSSARY)
