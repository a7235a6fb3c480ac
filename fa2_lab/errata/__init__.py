"""Known slips in the sources, each with the wrong version, the right one, and a check that tells them apart.

fa2-lab errata            all of them, run
fa2-lab errata ID         one of them in full
"""

from fa2_lab.errata import article, bilingual, fa1_paper, fa2_paper, notes
from fa2_lab.errata.erratum import Erratum, Verdict, judge

ERRATA: dict[str, Erratum] = {
    e.id: e for source in (fa2_paper, fa1_paper, notes, article, bilingual) for e in source.ERRATA
}

__all__ = ["ERRATA", "Erratum", "Verdict", "judge"]
