//! Cases for the elementwise ops.

use crate::lab::{Arrangement, Case, Values};
use crate::op::OpSpec;
use crate::ops::FLOATS;

/// Cases that reach every path of the engine, for an op whose sizes are rows and columns.
pub(in crate::ops) fn every_path(spec: &OpSpec, vary: impl Fn(Case) -> Vec<Case>) -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in FLOATS {
        let plain = Case::new(spec, dtype);
        for sizes in [[0, 64], [1, 1], [3, 7], [2, 8], [65, 31], [4, 256], [3, 1023], [2, 4099], [1, 70_001]]
        {
            cases.extend(vary(plain.clone().sizes(&sizes)));
        }
        // Rows and runs whose pieces are not aligned: in several segments, of which the last has a few elements.
        for arrangement in [Arrangement::PaddedRows, Arrangement::Misaligned] {
            for sizes in [[9, 131], [5, 2051], [1, 9001]] {
                cases.extend(vary(plain.clone().sizes(&sizes).arranged(arrangement)));
            }
        }
        let case = plain.sizes(&[33, 264]);
        for arrangement in [Arrangement::PaddedRows, Arrangement::Transposed, Arrangement::Misaligned] {
            cases.extend(vary(case.clone().arranged(arrangement)));
        }
        cases.extend(vary(case.clone().values(Values::Large)));
        cases.extend(vary(case.clone().values(Values::Special)));
        cases.extend(vary(case.in_place()));
    }
    cases
}
