"""Faults of machine/."""

GRID, TIME, BUDGET = (f"fa2_lab/machine/{name}.py" for name in ("grid", "time", "budget"))
COMPARE = "tests/heart/test_machine_grid.py::test_compare_says_what_the_schedule_says"
BY_HAND = "tests/heart/test_machine_budget.py::test_the_sizes_of_the_fa2_paper_by_hand"
TABLE = "tests/heart/test_machine_budget.py::test_table_asks_about_the_kernel_the_stages_and_the_dtype_that_are_meant"

FAULTS = [
    (GRID, "        waves=ran.waves,", "        waves=ran.SMs_used,", COMPARE),
    (GRID, "        tail=ran.tail,", "        tail=ran.makespan,", COMPARE),
    (GRID, "        SMs_used=ran.SMs_used,", "        SMs_used=ran.SMs,", COMPARE),
    (GRID, "        utilisation=ran.utilisation,", "        utilisation=efficiency(len(blocks), ran.slots),", COMPARE),
    (GRID, "schedule(grid[-1], SMs, blocks_per_sm)) for", "schedule(grid[-1], SMs)) for", COMPARE),
    (
        GRID,
        "key=lambda block: -block.cost",
        "key=lambda block: block.cost",
        "tests/heart/test_machine_grid.py::test_heaviest_first_shortens_the_causal_tail",
    ),
    (
        GRID,
        'i if direction == "forward" else j',
        "i",
        "tests/heart/test_machine_grid.py::test_owners_are_the_workers_that_the_meter_saw",
    ),
    (
        GRID,
        "steps[j, : len(visited)] = visited",
        "steps[j, : len(visited)] = visited[::-1]",
        "tests/heart/test_machine_grid.py::test_without_a_mask_all_workers_meet_on_the_same_rows_and_with_it_none",
    ),
    (
        GRID,
        "if len(workers) > 1}",
        "if len(workers) > 2}",
        "tests/heart/test_machine_grid.py::test_dq_writers_and_steps_agree",
    ),
    (BUDGET, "+ stages * 2 * B_r * STATISTIC", "+ 2 * B_r * STATISTIC", BY_HAND),
    (BUDGET, "stages, itemsize) + B_r * B_c * itemsize", "stages, itemsize) + B_r * d * itemsize", BY_HAND),
    (BUDGET, "STATISTIC = 4  #", "STATISTIC = 2  #", BY_HAND),
    (
        BUDGET,
        "RESERVED = 1 * KiB",
        "RESERVED = 0 * KiB",
        "tests/heart/test_machine_budget.py::test_blocks_per_sm_by_hand",
    ),
    (BUDGET, "d, stages, W, itemsize, kernel)\n", "d, stages, W, 2, kernel)\n", TABLE),
    (BUDGET, "d, stages, W, itemsize, kernel)\n", "d, stages, W, itemsize)\n", TABLE),
    (
        TIME,
        "tiling.B_c, d, W=W)\n    ran",
        "tiling.B_c, d)\n    ran",
        "tests/heart/test_machine_time.py::test_the_number_of_warps_decides_how_often_an_a100_reads_shared_memory",
    ),
    (
        TIME,
        "sizes=sizes, stages=stages)",
        "sizes=sizes)",
        "tests/heart/test_machine_time.py::test_best_blocks_fit_with_the_stages_that_are_asked_for",
    ),
    (
        TIME,
        "return sorted(times, key=lambda t: t.seconds[1])",
        "return sorted(times, key=lambda t: t.seconds[0])",
        "tests/heart/test_machine_time.py::test_best_blocks_are_sorted_and_fit",
    ),
    (
        TIME,
        'order="heaviest first"), chip.SMs',
        'order="rows"), chip.SMs',
        "tests/heart/test_machine_time.py::test_a_causal_forward_launches_its_heaviest_blocks_first",
    ),
    (TIME, "MASKING = 2", "MASKING = 1", "tests/heart/test_machine_time.py::test_causal_times_are_sums_over_tiles"),
    (
        "fa2_lab/machine/ring.py",
        '(item + (FP32 if direction == "backward" else 0))',
        "(item + FP32)",
        "tests/heart/test_machine_ring.py::test_a_step_by_hand",
    ),
    (
        "fa2_lab/machine/io.py",
        "Counter(self.stores) + Counter(other.stores)",
        "Counter(self.stores) | Counter(other.stores)",
        "tests/heart/test_machine_io.py::test_traffic_adds_up_over_heads_and_passes",
    ),
    (
        "fa2_lab/machine/hopper.py",
        "(self.blocks - 1 - t) * self.consumers",
        "t * self.consumers",
        "tests/heart/test_machine_hopper.py::test_heavy_blocks_are_drawn_before_light_ones",
    ),
    (
        "fa2_lab/kernels/decode/shares.py",
        "splits * heads >= SPLITS_FILL * slots",
        "splits * heads >= 0.5 * slots",
        "tests/heart/test_machine_splits.py::test_heads_are_split_where_that_fills_the_slots",
    ),
]
