"""The course: checks for nine assignments, planted bugs, and the release and grading of notebooks.

report     what one step's checks found: expected, came, where it first differs, one hint
guard      how a check calls a student's function: here, with solutions out of reach, or in another process
truth      attention by its definition, and the small cases that students' functions are checked on
meter      a Trace that knows which tile a load belongs to
softmax, tiled, gradients, triton_steps, break_it, predict, triton_backward, detective, climb      the checks
probes_triton, probes_cases      beside the student's code: a meter, mended programs
probes_ladder, listing      what a forward launches, told beside the student's code, and run as a text of its own
seeds, kit      numbers, sizes and planted bugs of each student's own; bundles for a class, the leaderboard
notebooks  assignments and what is handed in: building, releasing, reading
grade      a folder of submissions: each in a process that may be lost; judge: one notebook's tests
walls      what stands in for namespaces where there are none
sandbox    the box around a student's process; worker: what runs in it; channel: plain messages between the two
rules      the part of the package that a student's process gets; probes: what runs beside the student's code
results, due, command       records, tables and pages; due dates of a class; the command line
"""
