"""Faults of distributed/: what travels, in which dtype, and what the ranks must agree on."""

RING, GROUP, SHARD, STATE = (f"fa2_lab/distributed/{name}.py" for name in ("ring", "group", "shard", "state"))
HERE = "tests/heart/test_distributed.py::"
ONE_DEVICE = HERE + "test_as_on_one_device"
FP32 = HERE + "test_gradients_travel_and_are_summed_in_fp32"

FAULTS = [
    (RING, "shards.halves(q.shape[2], ring.causal)[0]", "shards.halves(q.shape[2], ring.causal)[1]", ONE_DEVICE),
    (RING, "seen = last_half if source == ring.rank else", "seen =", ONE_DEVICE),
    (
        "fa2_lab/reference/shards.py",
        "length // (4 if causal else 2)",
        "length // 2",
        "tests/heart/test_reference.py::test_a_rank_s_own_meeting_in_two_calls",
    ),
    (RING, "x.new_empty((*x.shape[:2], self.lengths[source]", "x.new_empty((*x.shape[:2], x.shape[2]", ONE_DEVICE),
    (RING, "(begun[0], begun[1][:, heads], begun[2][:, heads])", "begun", HERE + "test_heads_take_turns"),
    (
        GROUP,
        "for other in range(len(self.every)) if other != rank",
        "for other in range(1, len(self.every))",
        ONE_DEVICE,
    ),
    (RING, "dQ, *home = (torch.zeros_like(x, dtype=torch.float32) for", "dQ, *home = (torch.zeros_like(x) for", FP32),
    (RING, "else [torch.zeros_like(x, dtype=torch.float32)", "else [torch.zeros_like(x)", FP32),
    (
        RING,
        "dO = torch.zeros_like(O) if dO is None else dO",
        "dO = torch.ones_like(O) if dO is None else dO",
        HERE + "test_a_loss_of_L_alone_and_of_O_alone",
    ),
    (RING, "bytes_per_head = 2 * batch *", "bytes_per_head = batch *", HERE + "test_heads_take_turns"),
    (RING, "        q = -q\n", "        pass\n", HERE + "test_as_on_one_device[negative scale]"),
    (
        RING,
        "x.numel() * x.element_size() for x in block",
        "x.numel() for x in block",
        HERE + "test_every_rank_sends_what_the_model_says",
    ),
    (GROUP, 'OWN = ("length",)', 'OWN = ("length", "layout")', HERE + "test_every_rank_is_told_at_once"),
    (GROUP, "        SIDE[group, timeout] = None\n", "", HERE + "test_a_group_that_has_lost_a_rank_stays_lost"),
    (STATE, "m_new.masked_fill(m_new == -torch.inf, 0.0)", "m_new", HERE + "test_state_is_the_ladder_s"),
    (STATE, "l.mul_(alpha).add_(beta)", "l.mul_(beta).add_(alpha)", HERE + "test_state_is_the_ladder_s"),
    (SHARD, "start += shards.size(place)", "start -= shards.size(place)", HERE + "test_as_on_one_device"),
]
