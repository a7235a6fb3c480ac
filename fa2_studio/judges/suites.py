"""The test suites, each with its project and commit, our adapter for the modules it imports, and the tests to run."""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec

FLASH_ATTENTION = "https://github.com/Dao-AILab/flash-attention", "0251105a2fb19d2957484b7f023cd8c115286ced"


@dataclass(frozen=True)
class PeerTests:
    """A file of tests from another project, and how we run it."""

    title: str
    repository: str
    commit: str
    tests: str  # the file with the tests in the checkout
    adapter: str  # our module in fa2_studio.judges.adapters that replaces theirs
    replaced_modules: tuple[str, ...]  # the modules that the tests import, each replaced with an import of the adapter
    # Their helpers: {file in the checkout: copy for the tests}
    copied_files: dict[str, str] = field(default_factory=dict)
    # {their text: our text}, to replace in the file with the tests
    replacements: dict[str, str] = field(default_factory=dict)
    pytest_file: str = ""  # the file that pytest runs, if it is not `tests`
    needs: tuple[str, ...] = ()  # packages that the tests import
    needs_gpu: bool = True
    sample: int = 1  # 1 runs all applicable tests, and n runs about one in n, chosen by a hash of the test's name
    sample_on_a_laptop: int = 1  # the same without a GPU
    environment: dict[str, str] = field(default_factory=dict)
    # Returns why a case does not apply, or "" if it does
    reason_to_leave_out: Callable[[str, dict], str] = lambda test, case: ""


def reason_in_flash_attention_2(test: str, case: dict) -> str:
    """Return why a FlashAttention-2 case is left out (a feature that we lack, or dropout), or "" if it applies."""
    if test in ("test_flash_attn_kvcache", "test_flash_attn_splitkv", "test_flash_attn_generator_arg_must_be_none"):
        return "a cache that the call writes, or their own extension's arguments"
    if "paged" in test or case.get("paged_kv_block_size"):
        return "pages in a call for packed sequences"
    if case.get("alibi"):
        return "ALiBi"
    return (
        "dropout, for which the other project uses a different random number generator" if case.get("dropout_p") else ""
    )


def reason_in_flash_attention_3(test: str, case: dict) -> str:
    """Return why a FlashAttention-3 case is left out (a feature that we lack, or memory), or "" if it applies."""
    if test == "test_flash_attn_race_condition":
        return "a test that takes 70 GiB, instead of which we run FlashAttention-2's test of the same name"
    if test not in ("test_flash_attn_output", "test_flash_attn_varlen_output"):
        return "a cache that the call writes, or parts of their own interface"
    if "float8" in str(case.get("dtype")):
        return "FP8"
    if case.get("has_qv"):
        return "a second query for V (qv)"
    return "rows that the call skips (seqused)" if case.get("add_unused_qkv") else ""


def reason_in_flash_attention_4(test: str, case: dict) -> str:
    """Return why a FlashAttention-4 case is left out (a feature that we lack), or "" if it applies."""
    if any(word in test for word in ("mla", "deepseek", "fp8", "paged", "kvcache", "sm100", "sm120", "metadata")):
        return "latent attention, FP8, a cache that the call writes, or one chip's scheduler"
    if any(word in test for word in ("preallocated", "invalid_head", "ex2_emu", "small_head", "per_split", "layouts")):
        return "parts of their own interface"
    if case.get("local_enum", 0) > 1 and "varlen" not in test:
        return "windows of negative size"
    padded = not (case.get("unpad_q", True) and case.get("unpad_kv", True))
    return "rows that the call skips (seqused)" if padded else ""


def reason_in_torch(test: str, case: dict) -> str:
    """Return why a PyTorch case is left out (the registration of their operator), or "" if it applies."""
    return "the registration of their own operator" if "custom_op" in test else ""


def reason_in_vllm(test: str, case: dict) -> str:
    """Return why a vLLM case is left out (a feature that we lack, or a repeated call), or "" if it applies."""
    if "fa4" in test:
        return "a kernel for Blackwell"
    if case.get("q_dtype") is not None:
        return "FP8"
    return AGAIN if case.get("fa_version") != 2 else ""


def reason_in_flashinfer(test: str, case: dict) -> str:
    """Return why a FlashInfer case is left out (a repeated call), or "" if it applies."""
    return AGAIN if case.get("backend") == "fa3" else ""


def reason_in_transformers(test: str, case: dict) -> str:
    """Return why a transformers case is left out (another subject, or a repetition), or "" if it applies."""
    if not test.startswith("test_eager_matches_sdpa_inference"):
        return "tests of something other than attention"
    if "output_attentions" in test:
        return "attention weights as an output"
    return AGAIN if "sdpa_kernels" in test else ""


DEVICE_CODE = '"cuda" if torch.cuda.is_available() else "cpu"'
AGAIN = "the same call again, because the other project chooses between two kernels"

SUITES = {
    "flash-attention-2": PeerTests(
        "FlashAttention-2",
        *FLASH_ATTENTION,
        tests="tests/test_flash_attn.py",
        adapter="flash_attention_2",
        replaced_modules=(
            "flash_attn/__init__.py",
            "flash_attn/flash_attn_interface.py",
            "flash_attn/layers/__init__.py",
            "flash_attn/layers/rotary.py",
        ),
        copied_files={"flash_attn/bert_padding.py": "flash_attn/bert_padding.py"},
        needs=("einops",),
        reason_to_leave_out=reason_in_flash_attention_2,
        sample=35,
    ),
    "flash-attention-3": PeerTests(
        "FlashAttention-3",
        *FLASH_ATTENTION,
        tests="hopper/test_flash_attn.py",
        adapter="flash_attention_3",
        replaced_modules=("flash_attn_interface.py",),
        copied_files={"hopper/padding.py": "padding.py", "hopper/test_util.py": "test_util.py"},
        replacements={  # test only values as wide as the keys, and no attention within chunks
            "dv_vals = [128, d] if d > 128 and d <= 192 else ([256, 512, d] if d <= 64 else [d])": "dv_vals = [d]",
            "attention_chunk_vals = [torch.randint(1, seqlen_k * 2, (1,)).item(), 0]": "attention_chunk_vals = [0]",
        },
        environment={
            f"FLASH_ATTENTION_DISABLE_{x}": "TRUE" for x in ("FP8", "PACKGQA", "SPLIT", "PAGEDKV", "APPENDKV")
        },
        needs=("einops",),
        reason_to_leave_out=reason_in_flash_attention_3,
        sample=6,
    ),
    "flash-attention-4": PeerTests(
        "FlashAttention-4",
        *FLASH_ATTENTION,
        tests="tests/cute/test_flash_attn.py",
        adapter="flash_attention_4",
        replaced_modules=("flash_attn/__init__.py", "flash_attn/cute/interface.py", "flash_attn/cute/cache_utils.py"),
        copied_files={"flash_attn/cute/testing.py": "flash_attn/cute/testing.py"},
        # Test only values as wide as the keys, which also tests a backward pass missing from their Hopper kernels.
        replacements={
            "dv_vals = [128] if d == 192 else ([d] if d != 128 else [64, d])": "dv_vals = [d]",
        },
        environment={"FLASH_ATTENTION_DISABLE_SPLIT": "TRUE"},
        needs=("einops",),
        reason_to_leave_out=reason_in_flash_attention_4,
        sample=45,
    ),
    "cs336": PeerTests(
        "CS336, assignment 2",
        "https://github.com/stanford-cs336/assignment2-systems",
        "9d95f3b5dc4a5fc48c2661b58d2e509bbc904e36",
        tests="tests/test_attention.py",
        adapter="cs336",
        replaced_modules=("tests/adapters.py",),
        copied_files={"tests/__init__.py": "tests/__init__.py"},
        needs_gpu=False,
    ),
    "torch": PeerTests(
        "torch's varlen attention",
        "https://github.com/pytorch/pytorch",
        "02ab03ff574cb2dbced0cd0d457a98dedc5ba177",
        tests="test/test_varlen_attention.py",
        adapter="torch_varlen",
        replaced_modules=("test/ours.py",),
        replacements={
            "from torch.nn.attention.varlen import varlen_attn": "from ours import varlen_attn",
            "from torch.testing._internal.common_cuda import PLATFORM_SUPPORTS_FLASH_ATTENTION": (
                "PLATFORM_SUPPORTS_FLASH_ATTENTION = True"
            ),
            'device_types = ("cuda",)': f"device_types = ({DEVICE_CODE},)",
        },
        needs=("expecttest",),
        reason_to_leave_out=reason_in_torch,
        needs_gpu=False,
        sample_on_a_laptop=16,
    ),
    "transformers": PeerTests(
        "transformers",
        "https://github.com/huggingface/transformers",
        f"v{version('transformers')}" if find_spec("transformers") else "v5.24.0",
        tests="tests/test_modeling_common.py",
        pytest_file="tests/test_models.py",
        adapter="transformers_models",
        replaced_modules=("tests/test_models.py",),
        replacements={
            "from .exporters.test_export import ExportTesterMixin": "ExportTesterMixin = object",
            "from .generation.test_utils import GenerationTesterMixin": "GenerationTesterMixin = object",
            'attn_implementation="sdpa"': 'attn_implementation="fa2_lab"',
            "if not self.all_model_classes[0]._supports_sdpa:": "if False:",  # do not skip softcap and sinks
            # Without this change, models that refuse our attention would be tested with PyTorch's attention.
            "model_sdpa = model_class.from_pretrained(**model_from_pretrained_kwargs)": "raise",
        },
        needs=("transformers", "parameterized"),
        reason_to_leave_out=reason_in_transformers,
        needs_gpu=False,
    ),
    "vllm": PeerTests(
        "vLLM, paged",
        "https://github.com/vllm-project/vllm",
        "v0.33.0",
        tests="tests/kernels/attention/test_flash_attn.py",
        adapter="vllm",
        replaced_modules=(
            "vllm/__init__.py",
            "vllm/platforms.py",
            "vllm/utils/__init__.py",
            "vllm/utils/torch_utils.py",
            "vllm/vllm_flash_attn.py",
        ),
        replacements={'torch.set_default_device("cuda")': f"torch.set_default_device({DEVICE_CODE})"},
        reason_to_leave_out=reason_in_vllm,
        needs_gpu=False,
        sample_on_a_laptop=16,
    ),
    "flashinfer": PeerTests(
        "FlashInfer, sinks",
        "https://github.com/flashinfer-ai/flashinfer",
        "fb28d7242b3506a2348265962041acc1fb56cca4",
        tests="tests/attention/test_attention_sink.py",
        adapter="flashinfer",
        replaced_modules=(
            "flashinfer/__init__.py",
            "flashinfer/utils.py",
            "flashinfer/jit/__init__.py",
            "flashinfer/jit/utils.py",
            "flashinfer/jit/attention/__init__.py",
            "flashinfer/jit/attention/variants.py",
        ),
        copied_files={
            "tests/test_helpers/sink_attention_reference.py": "tests/test_helpers/sink_attention_reference.py"
        },
        replacements={'torch.device("cuda:0")': f"torch.device({DEVICE_CODE})"},
        needs=("einops",),
        reason_to_leave_out=reason_in_flashinfer,
        needs_gpu=False,
        sample_on_a_laptop=183,  # chosen to sample short cases, because others take minutes each in the interpreter
    ),
}
