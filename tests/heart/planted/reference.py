"""Faults of the reference, the meter, the tiles, the papers' lines, the errata and their commands.

Each row is a file, an exact text of it, what is put in its place, and the test that must see it.
"""

R, E, P, G = "fa2_lab/reference/", "fa2_lab/errata/", "fa2_lab/paper.py", "fa2_lab/glossary.py"
TRACE, TILES, COMMAND = "fa2_lab/trace.py", "fa2_lab/tiles.py", "fa2_lab/tools/command.py"
R08, LADDER_FA1 = "fa2_lab/kernels/ladder/r08_pipelined.py", "fa2_lab/kernels/ladder/r01_fa1.py"

CORNERS = "tests/heart/test_reference.py::test_corner_cases"
HEADS = "tests/heart/test_reference.py::test_heads_and_groups"
ADVERSE = "tests/heart/test_reference.py::test_windows_sinks_and_caps_at_their_worst"
DSINK = "tests/heart/test_reference.py::test_dsink_by_central_differences"
INPUT = "tests/heart/test_reference_refusals.py::test_bad_input_is_named"
DIFF = "tests/heart/test_reference.py::test_the_difference_of_fa1_and_fa2_is_a_dozen_lines"
ON_CHIP = "tests/heart/test_machine_io.py::test_on_chip_equals_the_meters_peak"
WORKERS = "tests/heart/test_trace.py::test_workers_are_the_parallel_loops"
KINDS = "tests/heart/test_trace.py::test_each_kind_of_operation_has_its_name"
COUNTED = "tests/heart/test_trace.py::test_a_load_a_product_and_a_store_are_counted"
LOOPS_END = "tests/heart/test_trace.py::test_after_a_loop_its_index_is_forgotten_and_the_peak_stays"
MASKS = "tests/heart/test_tiles.py::test_kinds_match_the_mask"
GEOMETRY = "tests/heart/test_tiles.py::test_bad_geometry_is_named"
WORDS = "tests/heart/test_paper.py::test_a_line_in_our_words_is_what_its_tagged_code_computes"
SHAPES = "tests/heart/test_paper.py::test_a_tag_stands_on_a_line_of_its_own_shape"
MISSING = "tests/heart/test_paper.py::test_no_tag_is_missing_in_the_triton_file_that_stands_for_an_algorithm"
SHORT = "tests/heart/test_paper.py::test_a_short_answer_has_ten_lines_at_most_and_names_what_matters"
PICTURES = "tests/heart/test_paper.py::test_every_line_but_returns_has_one_picture_that_exists"
CHECKOUT = "tests/heart/test_paper.py::test_where_in_a_checkout_of_all_three"
TITLES = "tests/heart/test_paper.py::test_algorithms_have_their_papers_titles_and_places"
IN_FA2 = "tests/heart/test_paper.py::test_a_line_of_fa1_s_backward_has_its_counterpart_in_fa2_s"
SYMBOLS = "tests/heart/test_glossary.py::test_what_the_glossary_says_of_a_symbol_holds"
SENT = "tests/heart/test_glossary.py::test_a_term_stands_where_the_glossary_sends_its_reader"
CHINESE = "tests/heart/test_glossary.py::test_a_chinese_word_stands_for_one_english_word"
AGAIN = "tests/heart/test_errata.py::test_the_words_and_two_computations_say_the_same"
JUDGES = "tests/heart/test_errata.py::test_a_check_judges_every_number_that_the_right_version_has"
NUMBERS = "tests/heart/test_errata.py::test_numbers_in_the_reasons_are_counted"
CITED = "tests/heart/test_errata.py::test_a_source_is_cited_by_section"
SITS = "tests/heart/test_errata.py::test_the_lines_that_name_an_erratum_are_those_it_is_about"

FAULTS = [
    # What is computed
    (R + "naive.py", "return m + np.log(nonzero(", "return m - np.log(nonzero(", CORNERS),
    (R + "naive.py", "dK[j] = tau * cap_backward(", "dK[j] = cap_backward(", CORNERS),
    (R + "naive.py", "dropped(dO[:] @ V[:].T, z)", "dO[:] @ V[:].T", CORNERS),
    (
        R + "naive.py",
        "P * (dP - D_from",
        "P * (dP + D_from",
        "tests/heart/test_reference.py::test_softmax_jacobian_and_D_two_ways",
    ),
    (
        R + "online_softmax.py",
        "o2 = np.exp(m1 - m2)[:, None] * o1",
        "o2 = o1",
        "tests/heart/test_reference.py::test_two_blocks_and_rabe_staats",
    ),
    (
        R + "online_softmax.py",
        "return blocks * incremental",
        "return blocks + incremental",
        "tests/heart/test_reference.py::test_two_blocks_and_rabe_staats",
    ),
    (
        R + "online_softmax.py",
        "alpha * self.l + beta * other.l",
        "self.l + beta * other.l",
        "tests/heart/test_reference.py::test_merge_laws",
    ),
    (
        R + "fa1.py",
        "return min(B_c, d), B_c",
        "return B_c, B_c",
        "tests/heart/test_reference.py::test_fa1_block_sizes_come_from_M",
    ),
    (R + "fa1.py", "l_new = alpha * l_i + beta * l_ij", "l_new = alpha * l_i + l_ij", CORNERS),
    (R + "fa2.py", "l_new = alpha * l_i + l_ij", "l_new = l_i + l_ij", CORNERS),
    (R + "fa2.py", "p_ij = drop(p_ij, rows, cols)\n", "pass\n", CORNERS),
    (
        R + "fa2.py",
        "size = cdiv(len(blocks), splits) or 1",
        "size = len(blocks) or 1",
        "tests/heart/test_reference.py::test_the_meter_sees_the_split_workers",
    ),
    (R + "fa2.py", "state = state.merge(SoftmaxState.from_output(", "state = (SoftmaxState.from_output(", CORNERS),
    (R + "fa2.py", "alpha = np.exp(m_i - finite(m_new))", "alpha = 1 / np.exp(m_i - finite(m_new))", CORNERS),
    (R + "fa2.py", "o_i = alpha[:, None] * o_i + p_ij @ v_j", "o_i = alpha[:, None] * (o_i + p_ij @ v_j)", CORNERS),
    (
        R + "dropout.py",
        "return int(p * 2.0**32)",
        "return int(p * 2.0**31)",
        "tests/heart/test_reference.py::test_dropout_keeps_the_right_share_and_differs_by_key",
    ),
    (
        R + "dropout.py",
        "for _ in range(10):",
        "for _ in range(7):",
        "tests/heart/test_reference.py::test_philox_known_answers",
    ),
    (
        R + "dropout.py",
        "i, j = (b, a) if order",
        "i, j = (a, b) if order",
        "tests/heart/test_reference.py::test_a_sequential_generator_replays_only_in_its_own_order",
    ),
    (
        R + "dropout.py",
        "draw(tile.shape) >= p",
        "draw(tile.shape) < p",
        "tests/heart/test_reference.py::test_a_sequential_generator_replays_only_in_its_own_order",
    ),
    (
        R + "dropout.py",
        "[:, None], head, batch)",
        "[:, None], batch, head)",
        "tests/heart/test_reference.py::test_a_mask_is_keyed_by_column_row_head_and_batch",
    ),
    (R + "dropout.py", "if not 0 <= self.p < 1:", "if not 0 <= self.p <= 1:", INPUT),
    (R + "checks.py", "return 1.0 / np.sqrt(d)", "return 1.0 / d", CORNERS),
    (R + "heads.py", "return O, m + np.log(nonzero(l))", "return O, m + np.log(nonzero(l)) / 2", HEADS),
    (
        R + "heads.py",
        "common | dict(trace=UNWATCHED)",
        "common",
        "tests/heart/test_trace.py::test_a_stage_of_heads_is_metered_once",
    ),
    (R + "heads.py", "dK[b, h // group] += dk", "dK[b, h // group] = dk", HEADS),
    # What the meter is told, and what it says
    (R + "fa1.py", "o_i, l_i, m_i, s_ij)\n", "o_i, l_i, s_ij)\n", ON_CHIP),
    (R + "fa2.py", "trace.hold(q_i, k_j, v_j, do_i, dq_i, dk_j,", "trace.hold(q_i, k_j, v_j, do_i, dk_j,", ON_CHIP),
    (
        R + "fa2.py",
        'in trace.parallel("i", range(tiling.T_r)):  # FA2.A1.L3',
        'in trace.serial("i", range(tiling.T_r)):  # FA2.A1.L3',
        WORKERS,
    ),
    (
        R + "fa2.py",
        'in trace.parallel("j", range(tiling.T_c)):  # FA2.A2.L5',
        'in trace.serial("j", range(tiling.T_c)):  # FA2.A2.L5',
        WORKERS,
    ),
    (TRACE, "max(self.peak_on_chip, sum(", "max(0, sum(", LOOPS_END),
    (TRACE, '{"exp", "exp2"}', '{"exp"}', KINDS),
    (TRACE, '"fmax": "maximum", ', "", KINDS),
    (TRACE, '"einsum", ', "", KINDS),
    (TRACE, '"kron", ', "", KINDS),
    (TRACE, "self._parallel.remove(name)", "pass", LOOPS_END),
    (TRACE, "self._at.pop(name, None)", "pass", LOOPS_END),
    (TRACE, 'not in ("matmul", "exp"))', 'not in ("matmul",))', COUNTED),
    (TRACE, "return self.loads() + self.stores()", "return self.loads()", COUNTED),
    (TRACE, "lambda worker, i, j: (i, j)", "lambda worker, i, j: (j, i)", COUNTED),
    # The two papers' steps stay beside each other
    (
        R + "fa1.py",
        "m_ij = s_ij.max(axis=1)  # FA1.A2.L12  (B_r,)\n",
        "largest = m_ij = s_ij.max(axis=1)  # FA1.A2.L12\n",
        DIFF,
    ),
    # Geometry
    (TILES, "end = N_k if self.key_length is None else self.key_length", "end = N_k", MASKS),
    (TILES, "else seen & self.mask.allowed[rows, cols]", "else seen", MASKS),
    (TILES, "return Tile.FULL if seen.all() else Tile.DIAGONAL if", "return Tile.DIAGONAL if", MASKS),
    (TILES, "return s_ij if self.kind(i, j) is Tile.FULL", "return s_ij if self.kind(i, j) is not Tile.SKIP", CORNERS),
    (TILES, "isinstance(value, (bool, np.bool_)) or not", "not", GEOMETRY),
    (TILES, "diagonal + right + 1, first), end)", "diagonal + right + 1, first), N_k)", MASKS),
    (TILES, "np.where(first < last, cdiv(last, self.B_c), first // self.B_c)", "cdiv(last, self.B_c)", MASKS),
    (TILES, "side is not None and side < 0", "side is not None and side < -1", GEOMETRY),
    # Scores that a model caps, and one that has no key
    (R + "scores.py", "-(np.exp(sink - finite(L)) * D).sum()", "-(np.exp(sink - finite(L)) * D).mean()", DSINK),
    (R + "scores.py", "(1 - (finite(s) / softcap) ** 2)", "(1 - (finite(s) / softcap))", ADVERSE),
    (R + "fa2.py", "state = SoftmaxState.reset(*q_i.shape)", "state = SoftmaxState.reset(*q_i.shape, sink)", ADVERSE),
    (R + "checks.py", "not above < x < np.inf", "not above <= x < np.inf", INPUT),
    (R + "heads.py", "O[:, h], L[:, h], dO[:, h]", "O[:, h], L[:, 0], dO[:, h]", HEADS),
    # Tags in NumPy: moved, swapped, lost
    (R + "fa2.py", "# FA2.A1.L12  (B_r, d)", "# (B_r, d)", WORDS),
    (R + "fa2.py", "p_ij @ v_j  # FA2.A1.L10", "p_ij @ v_j  # FA2.A1.L9", WORDS),
    (
        R + "fa2.py",
        "alpha = np.exp(m_i - finite(m_new))  # FA2.A1.L9",
        "alpha = np.exp(m_i - finite(m_new))  # FA2.A1.L10",
        WORDS,
    ),
    (
        R + "fa2.py",
        "# FA2.A1.L8  (B_r, B_c)\n            s_ij = tiling.hide(cap(s_ij, softcap), i, j)\n",
        "\n            s_ij = tiling.hide(cap(s_ij, softcap), i, j)  # FA2.A1.L8\n",
        WORDS,
    ),
    (
        R + "fa2.py",
        "o_i  # FA2.A1.L14\n        L[rows] = L_i  # FA2.A1.L15",
        "o_i  # FA2.A1.L15\n        L[rows] = L_i  # FA2.A1.L14",
        WORDS,
    ),
    (R + "fa2.py", "dq_i = dQ[rows]  # FA2.A2.L15", "dq_i = dQ[rows]  # FA2.A2.L14", WORDS),
    (R + "fa1.py", "# FA1.A4.L17", "# FA1.A4.L18", WORDS),
    (R + "naive.py", "(dS[:] @ K[:])  # FA1.A3.L4", "(dS[:] @ K[:])  # FA1.A3.L5", WORDS),
    (R + "fa1.py", "m[rows]  # FA1.A2.L9", "m[rows]", WORDS),
    # Tags in Triton and in the notebooks
    (R08, "alpha = tl.exp2(m_i - m_new)  # (B_r,)  FA2.A1.L9", "alpha = tl.exp2(m_i - m_new)  # (B_r,)", MISSING),
    (R08, "# (B_r, d)  FA2.A1.L10", "# (B_r, d)  FA2.A1.L9", SHAPES),
    (R08, "# FA2.A1.L14\n", "# FA2.A1.L15\n", SHAPES),
    (LADDER_FA1, "m_ij)  # (B_r,)  FA1.A2.L13", "m_ij)  # (B_r,)  FA1.A2.L12", SHAPES),
    ("fa2_lab/kernels/portable/forward.py", "FA2.A1.L12", "FA2.A1.L13", SHAPES),
    ("fa2_lab/kernels/portable/backward.py", "# (B_r, B_c)  FA2.A2.L13", "# (B_r, B_c)  FA2.A2.L12", SHAPES),
    (
        "notebooks/text/08_triton_forward.py",
        "alpha = tl.exp(m_i - m_new)  # (B_r,)  FA2.A1.L9",
        "alpha = tl.exp(m_i - m_new)  # (B_r,)  FA2.A1.L10",
        SHAPES,
    ),
    # The papers' lines in our words
    (P, "l_new = e^(m_i − m_new) l_i + rowsum(p_ij)", "l_new = l_i + rowsum(p_ij)", WORDS),
    (P, "e^(m̃ − m_new) p̃ v_j", "p̃ v_j", WORDS),
    (P, "o_i ← o_i / l_i", "o_i ← o_i l_i", WORDS),
    (P, '"Store L_i as block i of L."', '"Store l_i as block i of L."', WORDS),
    (P, '"Load q_i, do_i, L_i and D_i."', '"Load q_i, do_i and L_i."', WORDS),
    (P, "D = rowsum(dO ∘ O) (N)", "D = rowsum(dO ∘ O) (d)", WORDS),
    (
        P,
        "start dQ = 0 in T_r blocks; cut dK and dV into T_c",
        "start dQ = 0 in T_c blocks; cut dK and dV into T_r",
        WORDS,
    ),
    (P, "T_r = ⌈N / B_r⌉ blocks of B_r rows; cut K", "T_r = ⌈N / B_r⌉ blocks of B_c rows; cut K", WORDS),
    (P, "dv_j ← dv_j + p_ijᵀ do_i", "dv_j ← dv_j + p_ij do_i", WORDS),
    (P, "dQ_i ← dQ_i + τ ds_ij k_j", "dQ_i ← dQ_i + ds_ij k_j", WORDS),
    (P, "compute dQ = τ dS K", "compute dQ = dS K", WORDS),
    (P, 'title="FlashAttention-2, backward"', 'title="FlashAttention-2, forward"', TITLES),
    (P, 'source="FA2, section 3.1.2"', 'source="FA2, section 3.1.1"', TITLES),
    (P, "12, 13, 4, 14, 15", "12, 13, 14, 4, 15", IN_FA2),
    # where
    (P, '"FA2.A1": (3,), "FA2.A2": (1, 2, 3, 5', '"FA2.A1": (4,), "FA2.A2": (1, 2, 3, 5', PICTURES),
    (P, '"causal_tiles": {', '"dropout_orders ": {', PICTURES),
    (P, "(place.file != first, room(place.file)", "(room(place.file)", CHECKOUT),
    (P, '"portable", "decode", "hopper")', '"hopper", "decode", "portable")', CHECKOUT),
    (P, "SHOWN = 10", "SHOWN = 12", SHORT),
    (P, '"FA1.A2.L14": "the ladder', '"FA1.A2.L17": "the ladder', SHORT),
    # The words
    (G, '"column blocks: ⌈N_k / B_c⌉"', '"column blocks: ⌈N_q / B_c⌉"', SYMBOLS),
    (G, 'symbol("m", "02", "(N_q,)"', 'symbol("m", "02", "(N_k,)"', SYMBOLS),
    (G, "gradient with respect to S: P ∘ (dP − D)", "gradient with respect to S: P ∘ (dP + D)", SYMBOLS),
    (G, "exp(m_old − m_new)", "exp(m_new − m_old)", SYMBOLS),
    (G, 'warps, splits or GPUs", "合并"', 'warps, splits or GPUs", "填充"', CHINESE),
    (G, '"线程束通道", "A"', '"线程束通道", "00"', SENT),
    # Errata: the printed slip, its words, its check, its source
    (E + "fa2_paper.py", "divided_at_the_end(1 / TWO.l1)", "divided_at_the_end(TWO.l1)", AGAIN),
    (E + "fa2_paper.py", "divided_in_every_step(TWO.l2 / TWO.l1)", "divided_in_every_step(TWO.l1 / TWO.l2)", AGAIN),
    (
        E + "fa2_paper.py",
        "max(map(distance, found, (CASE.S, CASE.dQ, CASE.dK)))",
        "distance(found[1], CASE.dQ)",
        JUDGES,
    ),
    (
        E + "fa2_paper.py",
        "max(map(distance, gradients, (SQUARE.dQ, SQUARE.dK)))",
        "distance(gradients[0], SQUARE.dQ)",
        JUDGES,
    ),
    (E + "fa2_paper.py", "dQ = τ dS K, dK = τ dSᵀ Q.", "dQ = τ dS K, dK = dSᵀ Q.", AGAIN),
    (E + "fa2_paper.py", "wrong=lambda: 1.75", "wrong=lambda: 1.6", AGAIN),
    (E + "fa2_paper.py", "74% at 80, 50% at 109", "74% at 80, 51% at 109", NUMBERS),
    (E + "fa2_paper.py", 'claim="dK = Q dSᵀ."', 'claim="dK = Qᵀ dS."', AGAIN),
    (E + "fa2_paper.py", "UNSCALED.Q @ UNSCALED.dS.T", "UNSCALED.Q @ UNSCALED.dS", AGAIN),
    (E + "notes.py", "lecture notes on FA2, algorithm", "lecture notes on FA2", CITED),
    (E + "article.py", "causal_by_tiles(operator.gt)", "causal_by_tiles(operator.lt)", AGAIN),
    (E + "article.py", "13 tiles of 16 instead of 10", "12 tiles of 16 instead of 10", NUMBERS),
    (E + "article.py", "Skip if j · B_kv ≥ (i + 1) · B_q.", "Skip if j · B_kv > (i + 1) · B_q.", AGAIN),
    (E + "article.py", "with_hidden(0.0)", "with_hidden(1.0)", AGAIN),
    (E + "article.py", "tolerance=0.1", "tolerance=10.0", JUDGES),
    (E + "erratum.py", "tolerance: float = 1e-9", "tolerance: float = 1e-5", JUDGES),
    (
        E + "erratum.py",
        "refused and erratum.check(right)",
        "refused",
        "tests/heart/test_errata.py::test_a_version_that_is_no_better_is_not_told_apart",
    ),
    (E + "fa1_paper.py", "(cdiv(M_ON_CHIP, 4 * HEAD), cdiv", "(cdiv(M_ON_CHIP, HEAD), cdiv", AGAIN),
    (E + "fa1_paper.py", "4N² + 4Nd elements", "4N² + 3Nd elements", NUMBERS),
    (E + "fa1_paper.py", "Algorithms 2 and 4, line 2", "Algorithms 2 and 4, line 3", SITS),
    (E + "fa1_paper.py", "FA1 paper, appendix B.5", "FA1 paper, section B.5", CITED),
    (E + "fa2_paper.py", "second_tile(1 / np.exp(TWO.m1 - TWO.m2))", "second_tile(1.0)", AGAIN),
    (
        E + "cases.py",
        "np.abs(x - truth).max()",
        "np.abs(x - truth).mean()",
        "tests/heart/test_errata.py::test_the_truth_itself_is_true",
    ),
    (P, '("fa2-dQ-race", "fa2-scale")', '("fa2-dQ-race", "fa2-loads")', SITS),
    # Commands
    (
        COMMAND,
        "return 0 if all(v.told_apart for v in verdicts.values()) else 1",
        "return 0",
        "tests/heart/test_cli.py::test_an_erratum_whose_check_tells_nothing_apart_fails_the_command",
    ),
    (
        COMMAND,
        "return 0 if verdict.told_apart else 1",
        "return 0",
        "tests/heart/test_cli.py::test_an_erratum_whose_check_tells_nothing_apart_fails_the_command",
    ),
    (COMMAND, "'told apart' if apart", "'told apart' if not apart", "tests/heart/test_cli.py::test_errata_as_a_table"),
    (
        COMMAND,
        "right: error {verdict.right_error:.1e}",
        "right: error {verdict.wrong_error:.1e}",
        "tests/heart/test_cli.py::test_each_erratum_in_full_fits_the_screen",
    ),
    (
        COMMAND,
        "if erratum.id in line.errata]",
        "if erratum.id not in line.errata]",
        "tests/heart/test_cli.py::test_each_erratum_in_full_fits_the_screen",
    ),
    (COMMAND, "if arguments.term in (None, term.name):", "if True:", "tests/heart/test_cli.py::test_glossary"),
    (
        COMMAND,
        "found.full() if arguments.all and",
        "found.full() if not arguments.all and",
        "tests/heart/test_cli.py::test_where",
    ),
]
