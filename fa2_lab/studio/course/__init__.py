"""The course: checks for nine assignments, planted bugs, and the release and grading of notebooks.

report     what one step's checks found: expected, came, where it first differs, one hint
guard      the package's own solutions refuse to be called while a student's function runs
truth      attention by its definition, and the small cases that students' functions are checked on
meter      a Trace that knows which tile a load belongs to
softmax, tiled, gradients, triton_steps, break_it, predict, triton_backward, detective, climb      the checks
probes_triton, probes_cases, probes_ladder      beside the student's code: a meter, mended programs, a forward compiled
seeds, kit      numbers, sizes and planted bugs of each student's own; bundles for a class, the leaderboard
rules, notebooks, sandbox, grade, command                       reading, releasing, running and grading notebooks
"""
