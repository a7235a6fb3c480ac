"""The commands of `fa2-lab`, such as tour, doctor, examine, figures, ladder and xray."""
