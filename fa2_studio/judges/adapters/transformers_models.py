"""The tests that transformers runs on a model, applied to small models with our attention in place of PyTorch's."""

import unittest

import test_modeling_common as theirs  # copied beside this file
import torch
import transformers

import fa2_lab.transformers

fa2_lab.transformers.register()

SIZES = dict(
    vocab_size=48,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    use_cache=False,
    # With 0.02, all scores would be nearly the same, and even a scale twice as large would pass. With 0.4, rounding
    # errors would exceed the tests' tolerance. In fp32, eager attention itself is then as far from float64 as sdpa and
    # our attention, which both fail about half of the tests.
    initializer_range=0.1,
)
EXPERTS = dict(num_local_experts=2, num_experts_per_tok=1, experts_implementation="eager")
FAMILIES: dict[str, dict] = dict(
    Llama={},
    Mistral={},
    Qwen3={},
    Gemma2=dict(attn_logit_softcapping=2.0),
    Phi3={},
    GptOss=EXPERTS,
    Bert={},
    ModernBert={},
)


class OneModel:
    """A model tester, which supplies a model's configuration and inputs to the tests."""

    def __init__(self, family):
        self.config = getattr(transformers, f"{family}Config")(**SIZES | FAMILIES[family])

    def prepare_config_and_inputs_for_common(self):
        ids = torch.randint(3, SIZES["vocab_size"], (7, 12))
        return self.config, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def tests_of(family):
    def set_up(self):
        self.model_tester = OneModel(family)

    model = getattr(transformers, f"{family}Model")
    return type(
        f"{family}Test", (theirs.ModelTesterMixin, unittest.TestCase), dict(setUp=set_up, all_model_classes=(model,))
    )


globals().update({f"{family}Test": tests_of(family) for family in FAMILIES})
