"""The commands of `fa2-lab`: the tour, doctor, the examiner, the pictures, the ladder, and xray."""
