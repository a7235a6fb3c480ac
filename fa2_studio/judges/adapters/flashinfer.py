"""The adapter for FlashInfer's tests of sinks, which import objects that plan a call and then run it."""

from collections import defaultdict

from torch.nn.utils.rnn import pad_sequence

from fa2_studio.judges.adapters.common import bounds, packed, paged

filename_safe_dtype_map: dict = defaultdict(str)
attention_sink_decl: dict = defaultdict(str)  # their kernel's source, which ours does not need


class BatchPrefillWithRaggedKVCacheWrapper:
    """Attention with sinks over packed sequences."""

    def __init__(self, *_, **unused):
        pass

    def plan(self, qo_indptr, kv_indptr, *_, causal, window_left, **unused):
        self.starts = qo_indptr, kv_indptr
        self.masks = dict(causal=causal, window=bounds((window_left, -1)))

    def run(self, q, k, v, sink, sm_scale):
        cu_seqlens_q, cu_seqlens_k = (x.to(q.device) for x in self.starts)
        return packed(q, k, v, cu_seqlens_q, cu_seqlens_k, sinks=sink, scale=sm_scale, **self.masks)[0]


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithRaggedKVCacheWrapper):
    """Attention with sinks over sequences whose keys are stored in pages."""

    def plan(self, qo_indptr, page_indptr, pages, last_page_len, heads, kv_heads, d, page_size, **options):
        super().plan(qo_indptr, page_indptr, **options)
        self.table = pad_sequence(pages.split(page_indptr.diff().tolist()), batch_first=True)
        self.lengths = (page_indptr.diff() - 1) * page_size + last_page_len
        self.page_size = page_size

    def run(self, q, kv, sink, sm_scale):
        k, v = (x.reshape(-1, self.page_size, *x.shape[-2:]) for x in kv)
        starts, table, lengths = (x.to(q.device) for x in (self.starts[0], self.table, self.lengths))
        return paged(q, k, v, starts, table, lengths, sinks=sink, scale=sm_scale, **self.masks)


def has_flashinfer_jit_cache():
    return True


def is_sm90a_supported(device):
    return True


gen_batch_prefill_attention_sink_module = None
