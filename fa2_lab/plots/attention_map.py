"""Plot of the weights P for a real sentence, computed by a head that has learned to predict the next word."""

from functools import cache

import numpy as np

from fa2_lab.plots import style
from fa2_lab.reference import naive
from fa2_lab.tiles import CAUSAL

SENTENCE = "how much wood would a woodchuck chuck if a woodchuck could chuck wood"
WORDS, N = 12, 24  # the vocabulary size, which equals d, and the number of words per training text
STEPS, TEXTS, RATE = 150, 16, 0.3


def data(sentence: str = SENTENCE) -> dict:
    """Return the words of a sentence and the weights P that a trained head computes for them.

    The head was not trained on this sentence, and it sees each word only as an index.
    """
    words = sentence.split()
    vocabulary = list(dict.fromkeys(words))
    if len(vocabulary) > WORDS:
        raise ValueError(f"sentence: got {len(vocabulary)} different words; the head knows {WORDS}")
    _, P = naive.forward(
        *head(np.array([vocabulary.index(word) for word in words]), *train_head()), tau=1.0, mask=CAUSAL
    )
    return dict(words=words, P=P.round(2))


@cache
def train_head(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return W_Q and W_K after STEPS steps of gradient descent on random texts.

    Within a text, a word usually has the same successor each time it occurs.
    """
    draw = np.random.default_rng(seed)
    W = 0.1 * draw.standard_normal((2, WORDS, WORDS))
    for _ in range(STEPS):
        W -= RATE * np.mean([gradient(random_text(draw), *W) for _ in range(TEXTS)], axis=0)
    return W[0], W[1]


def random_text(draw: np.random.Generator) -> np.ndarray:
    """Return a random text of N + 1 words, each given as its index in the vocabulary.

    Each text is based on a new random permutation, which determines the usual successor of each word.
    """
    successors, words = draw.permutation(WORDS), [int(draw.integers(WORDS))]
    while len(words) <= N:
        follows_permutation = draw.random() < 0.8
        words.append(int(successors[words[-1]]) if follows_permutation else int(draw.integers(WORDS)))
    return np.array(words)


def one_hot(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return two one-hot matrices: the words of a text, and the word before each of them (zeros before the first)."""
    X = np.eye(WORDS)[words]
    return X, np.vstack([np.zeros(WORDS), X[:-1]])


def head(words: np.ndarray, W_Q: np.ndarray, W_K: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return Q, K and V for a text, computed with the head's weights W_Q and W_K."""
    X, before = one_hot(words)
    return X @ W_Q, before @ W_K, X


def gradient(words: np.ndarray, W_Q: np.ndarray, W_K: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the gradients of −Σ log O[i, word i + 1] with respect to W_Q and W_K, using the formulas of chapter 01."""
    Q, K, V = head(words[:-1], W_Q, W_K)
    O, P = naive.forward(Q, K, V, tau=1.0, mask=CAUSAL)  # O[i] holds each word's probability of following word i
    dO, rows = np.zeros_like(O), np.arange(len(O))
    dO[rows, words[1:]] = -1 / (O[rows, words[1:]] + 0.01)
    dQ, dK, _ = naive.backward(Q, K, V, P, dO, tau=1.0)
    X, before = one_hot(words[:-1])
    return X.T @ dQ, before.T @ dK


@style.picture
def draw(words: list[str], P: np.ndarray) -> style.Drawn:
    """Draw each weight as a square whose area is proportional to the weight."""
    caption = "At a word that it has seen before, this head looks at the word that followed it then."
    figure, ax = style.new_figure(4.3, f"{caption} The area of a square is the attention weight.")
    n = len(words)
    strong = [(i, j) for i, j in np.argwhere(np.asarray(P) > 0.8).tolist() if i]
    for i, row in enumerate(P):
        ax.plot([-0.5, n - 0.5], [i, i], color=style.MASKED, linewidth=0.6, zorder=0)
        for j in np.flatnonzero(row):
            side = float(np.sqrt(row[j]))
            look = dict(linewidth=2.2) if (i, j) in strong else dict(linewidth=0.5)
            style.box(ax, j - side / 2, i - side / 2, side, side, fill=style.hue("P"), **look)
    for i, j in strong if not style.is_narrow() else ():
        style.note(ax, n - 0.2, i, f"after {words[i]}: {words[j]}")
    style.strip_axes(ax, (-0.6, n - 0.4), (-0.6, n - 0.4), aspect="equal", ylabel="← queries")
    ax.set_xticks(range(n), words, rotation=90)
    ax.set_yticks(range(n), words)
    ax.xaxis.tick_top()
    ax.xaxis.set_label_position("top")
    ax.set_xlabel("keys →", labelpad=9)
    lookups = "; ".join(f"The second {words[i]} looks at {words[j]} with weight {P[i, j]:.2f}" for i, j in strong)
    alt = f"A map of {n} by {n} words: {' '.join(words)}. {lookups}. New words look at all words before them."
    return figure, alt
