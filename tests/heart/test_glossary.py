"""The glossary: its symbols against a small attention, its words against the chapters it sends a reader to."""

import re

import numpy as np

from fa2_lab.glossary import GLOSSARY, TERMS
from fa2_lab.paper import LINES, PACKAGE

OTHER_FORMS = dict(l="ell", recompute="recompu", pipelining="pipelined")
OTHER_FORMS |= {"bulk copy": "bulk copies", "register spill": "spill"}


def test_every_term_has_both_languages_a_place_where_it_stands_and_a_picture_that_exists():
    notebooks, ladder = PACKAGE.parent / "notebooks" / "text", PACKAGE / "kernels" / "ladder"
    files = {path.name.split("_")[0]: path for path in notebooks.glob("*.py")}
    files |= {f"rung {path.name[1:3]}": path for path in ladder.glob("r*.py")}
    assert len(GLOSSARY) == len(TERMS), "a term is there twice"
    for term in TERMS:
        assert term.english and re.search(r"[\u4e00-\u9fff]", term.chinese), term.name
        assert not term.picture or (PACKAGE.parent / "figures" / f"{term.picture}.svg").is_file(), term.name
        if term.explained:
            text = " ".join(files[term.explained].read_text(encoding="utf-8").replace("\n# ", " ").split())
            word, case = OTHER_FORMS.get(term.name, term.name), re.IGNORECASE if len(term.name) > 3 else 0
            assert re.search(rf"(?<![a-zA-Z]){re.escape(word)}", text, case), term
    used = set(re.findall(r"\b(?:d?[QKVOPS]|[DLMN]|[BT]_[rc])\b", " ".join(line.text for _, line in LINES.values())))
    assert used <= set(GLOSSARY), "a letter of the papers' lines is not explained"


def test_symbols_have_the_shapes_of_a_small_attention():
    draw = np.random.default_rng(3).standard_normal
    sizes = dict(N_q=7, N_k=10, d=3, B_r=2, B_c=4)
    Q, K, V, dO = (draw((n, 3)) for n in (7, 10, 10, 7))
    S = 3**-0.5 * Q @ K.T
    m, L = S.max(axis=1), np.log(np.exp(S).sum(axis=1))
    P, dP = np.exp(S - L[:, None]), dO @ V.T
    D = (P * dP).sum(axis=1)
    assert np.allclose(D, (dO * (P @ V)).sum(axis=1))  # as the glossary says of D
    tensors = dict(Q=Q, K=K, V=V, O=P @ V, S=S, P=P, dO=dO, dP=dP, dS=P * (dP - D[:, None]), m=m, l=L - m, L=L, D=D)
    tensors |= dict(dQ=Q, dK=K, dV=V, tau=0.5)
    for name, x in tensors.items():
        shape = GLOSSARY[name].shape
        names = [] if shape == "number" else re.findall(r"\w+", shape)
        assert np.shape(x) == tuple(sizes[n] for n in names), (name, shape)
