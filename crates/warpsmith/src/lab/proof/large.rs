//! Cases past 2^31 elements: too large for a reference, so some rows of the large call are compared, bit for bit,
//! with a small call on the same rows.

use super::bench_tensors::BenchTensors;
use super::{Outcome, only};
use crate::device::{Device, Stream};
use crate::error::{Error, Result};
use crate::lab::AnyProvable;
use crate::lab::{ArgPlan, Case, Fill};
use crate::op::{KernelInfo, Select};
use crate::tensor::DType;

/// The first element that 32-bit signed offsets cannot reach.
const REACH: usize = 1 << 31;
/// Rows compared at each place.
const ROWS: usize = 3;
/// The contents of outputs before a run: NaN in every float type.
static POISON: [u8; 1 << 20] = [0xff; 1 << 20];

/// The tensors of a case with more than 2^31 elements in its largest tensor.
pub struct Large {
    op: &'static dyn AnyProvable,
    case: Case,
    plan: Vec<Option<ArgPlan>>,
    tensors: BenchTensors,
    /// First rows of the parts that are compared.
    starts: Vec<usize>,
}

impl Large {
    /// Allocates and fills the case.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if the op has no batch dimension to grow, or the device has too little memory.
    pub fn new(op: &'static dyn AnyProvable, device: Device) -> Result<Large> {
        let unavailable = |why: String| Error::Unavailable {
            what: format!("{}: a case past 2^31 elements", op.spec().name),
            why,
            fix: "Run it on a device with more memory".into(),
        };
        let (case, plan) = grow(op).ok_or_else(|| unavailable("the op has no batch to grow".into()))?;
        let (needed, free) = (BenchTensors::bytes(&plan, case.arrangement)? as u64, device.memory()?.free);
        // Leaves memory for workspaces and for the rest of the machine.
        if needed > free / 10 * 9 {
            return Err(unavailable(format!(
                "it needs {:.1} GiB and {:.1} GiB are free",
                needed as f64 / (1u64 << 30) as f64,
                free as f64 / (1u64 << 30) as f64
            )));
        }
        let starts = places(&plan);
        let tensors = BenchTensors::new(op.spec(), &case, &plan, device)?;
        Ok(Large { op, case, plan, tensors, starts })
    }

    /// The case.
    pub fn case(&self) -> &Case {
        &self.case
    }

    /// Runs one kernel and compares; `None` if the kernel does not support the case or is not batch-invariant.
    /// Outputs without a batch dimension are computed but not compared.
    pub fn judge(&mut self, kernel: &KernelInfo, stream: &Stream) -> Result<Option<Outcome>> {
        if !kernel.batch_invariant {
            return Ok(None);
        }
        let select = only(kernel);
        for index in self.outputs() {
            self.tensors.refill(index, &POISON)?;
        }
        match run(self.op, &mut self.tensors, &self.case, stream, &select) {
            Ok(()) => {}
            Err(Error::Unsupported { .. }) => return Ok(None),
            Err(error) => return Ok(Some(Outcome::failed(error.to_string()))),
        }
        for &start in &self.starts {
            if let Some(why) = self.differs(start, stream, &select)? {
                return Ok(Some(Outcome::failed(why)));
            }
        }
        Ok(Some(Outcome { ok: true, error: 0.0, worst: 0.0, failure: None }))
    }

    fn outputs(&self) -> Vec<usize> {
        let args = self.op.spec().args.iter().enumerate();
        args.filter(|(i, arg)| arg.is_output() && self.plan[*i].is_some()).map(|(i, _)| i).collect()
    }

    /// The rows from `start` on of an argument; all of an argument without a batch.
    fn rows(&self, index: usize, start: usize) -> Result<Vec<u8>> {
        let view = self.tensors.view(index);
        let view = match self.plan[index].as_ref().and_then(|plan| plan.batch_dim) {
            Some(dim) => view.narrow(dim, start, ROWS).expect("the parts lie inside the batch"),
            None => view,
        };
        view.to_bytes()
    }

    fn differs(&self, start: usize, stream: &Stream, select: &Select) -> Result<Option<String>> {
        let mut plan = self.plan.clone();
        for plan in plan.iter_mut().flatten() {
            if let Some(dim) = plan.batch_dim {
                plan.shape[dim] = ROWS;
            }
            // Overwritten below; a generator only knows whole cases.
            plan.fill = Fill::Constant(0.0);
        }
        let spec = self.op.spec();
        let mut small = BenchTensors::new(spec, &self.case, &plan, stream.device())?;
        for (index, arg) in spec.args.iter().enumerate() {
            if plan[index].is_some() {
                // Outputs held poison before the large call, so arguments that are changed in part must hold it here
                // too.
                let rows = if arg.is_output() { &POISON[..] } else { &self.rows(index, start)? };
                small.refill(index, rows)?;
            }
        }
        if let Err(error) = run(self.op, &mut small, &self.case, stream, select) {
            return Ok(Some(format!("rows {start}.. alone: {error}")));
        }
        for index in self.outputs() {
            let batched = plan[index].as_ref().is_some_and(|plan| plan.batch_dim.is_some());
            if batched && small.view(index).to_bytes()? != self.rows(index, start)? {
                let name = spec.args[index].name;
                return Ok(Some(format!("`{name}`: rows {start}.. differ from the same rows run alone")));
            }
        }
        Ok(None)
    }
}

fn run(
    op: &dyn AnyProvable,
    tensors: &mut BenchTensors,
    case: &Case,
    stream: &Stream,
    select: &Select,
) -> Result<()> {
    op.run(&mut tensors.args(), &case.attrs, stream, select)?;
    stream.synchronize()
}

/// A benchmark case with its batch grown until the largest tensor has more than 2^31 elements.
fn grow(op: &dyn AnyProvable) -> Option<(Case, Vec<Option<ArgPlan>>)> {
    let cases = op.bench_cases();
    let base = cases.iter().find(|case| case.dtype == DType::BF16).or(cases.first())?;
    let plan = op.plan(base);
    let (batch, elements) = plan
        .iter()
        .flatten()
        .filter_map(|plan| {
            let batch = plan.shape[plan.batch_dim?];
            Some((batch, plan.shape.iter().product::<usize>()))
        })
        .max_by_key(|(_, elements)| *elements)?;
    let rows = REACH / (elements / batch.max(1)).max(1) + 2 * ROWS;
    for size in 0..base.sizes.len() {
        let mut case = base.clone();
        case.sizes[size] = (base.sizes[size] * rows).div_ceil(batch.max(1));
        let grown = op.plan(&case);
        let only_the_batch_grew = plan.iter().zip(&grown).all(|pair| match pair {
            (Some(a), Some(b)) => (0..a.shape.len()).all(|d| match a.batch_dim == Some(d) {
                true => b.shape[d] > a.shape[d],
                false => b.shape[d] == a.shape[d],
            }),
            (a, b) => a.is_none() && b.is_none(),
        });
        if only_the_batch_grew {
            return Some((case, grown));
        }
    }
    None
}

/// The first rows, those at 2^31 elements, the middle ones and the last.
fn places(plan: &[Option<ArgPlan>]) -> Vec<usize> {
    let batched = plan.iter().flatten().filter_map(|plan| {
        let batch = plan.shape[plan.batch_dim?];
        Some((plan.shape.iter().product::<usize>() / batch.max(1), batch))
    });
    let (row, batch) = batched.max().expect("a large case has a batch");
    let last = batch.saturating_sub(ROWS);
    [0, batch / 2, (REACH / row.max(1)).saturating_sub(1), last].map(|start| start.min(last)).to_vec()
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;
    use crate::ops;

    #[test]
    fn batches_grow_past_the_reach_of_32_bits_and_rows_stay_as_they_are() {
        assert!(grow(crate::lab::find("rms_norm").unwrap()).is_some());
        for op in ops::PROVABLE {
            let Some((case, plan)) = grow(*op) else { continue };
            let name = case.name(op.spec());
            let batched = plan.iter().flatten().filter(|plan| plan.batch_dim.is_some());
            let largest = batched.max_by_key(|plan| plan.shape.iter().product::<usize>()).unwrap();
            let elements: usize = largest.shape.iter().product();
            assert!((REACH + 1..REACH + (REACH >> 3)).contains(&elements), "{name}: {elements}");
            let batch = largest.shape[largest.batch_dim.unwrap()];
            let starts = places(&plan);
            assert!(starts.iter().all(|start| start + ROWS <= batch), "{name}: {starts:?}");
            let row = elements / batch;
            assert!(
                starts.iter().any(|start| (start * row..(start + ROWS) * row).contains(&REACH)),
                "{name}"
            );
        }
    }
}
