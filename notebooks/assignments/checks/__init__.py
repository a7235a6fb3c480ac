"""The checks of the assignments that students see. `python -m checks 1_online_softmax.ipynb` runs those of a notebook.

A check never calls what a student wrote. It asks `guard.call(function, *arguments)`; or `guard.beside(probe, function,
*arguments)` for what has to run beside the student's code; or `guard.apart(probe, function, *arguments)` for what runs
where none of it has run. So the same check judges in one process, and with the student's code in another.
"""
