"""The course: checks for six assignments, planted bugs, and the release and grading of notebooks.

report     what one step's checks found: expected, came, where it first differs, one hint
guard      the package's own solutions refuse to be called while a student's function runs
truth      attention by its definition, and the small cases that students' functions are checked on
meter      a Trace that knows which tile a load belongs to
softmax, tiled, gradients, triton_steps, break_it, predict      the checks of the six assignments
rules, notebooks, sandbox, grade, command                       reading, releasing, running and grading notebooks
"""
