//! What follows from a profile: where the time went.

use crate::intervals::{own, union};
use crate::model::{Bound, Form, Phase, SpanKind};
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};

/// Everything that tables of a phase show.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Summary {
    /// Nanoseconds of the phase.
    pub wall_ns: f64,
    /// The union of all kernels.
    pub busy_ns: f64,
    /// The rest: the host between kernels.
    pub idle_ns: f64,
    /// By kernel, the one that took the longest first.
    pub kernels: Vec<Row>,
    /// By form, likewise.
    pub forms: Vec<FormRow>,
    /// The layers of a model, in turn.
    pub layers: Vec<SpanRow>,
    /// What the host did between calls, and spans that a program named.
    pub spans: Vec<SpanRow>,
    /// How well the CPU's threads were used.
    pub threads: Option<Threads>,
    /// Nanoseconds of ops of gradients.
    pub backward_ns: f64,
}

/// A kernel, or calls of one form.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Row {
    /// The kernel.
    pub kernel: String,
    /// The op, if it is known.
    pub op: String,
    /// Nanoseconds of all launches.
    pub time_ns: f64,
    /// Of the time of all kernels.
    pub share: f64,
    /// How often it ran.
    pub launches: usize,
    /// The fewest bytes that they could move.
    pub bytes: f64,
    /// Arithmetic operations.
    pub flops: f64,
    /// The least nanoseconds by the measured limits, if they are known for every launch.
    pub limit_ns: Option<f64>,
    /// Part of the kernels' time that would be won at the limit.
    pub to_win: f64,
    /// On the CPU, part of its threads' time that was work. None if nothing was divided.
    pub threads_used: Option<f64>,
    /// Registers of a thread and bytes of shared memory of a block, on a GPU.
    pub registers: u32,
    /// Bytes of shared memory of a block, on a GPU.
    pub shared_bytes: u32,
}

impl Row {
    /// Part of the measured limit that was reached.
    pub fn of_limit(&self) -> Option<f64> {
        Some(self.limit_ns? / self.time_ns.max(1.0))
    }
}

/// Calls of one form.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct FormRow {
    /// Types and shapes.
    pub args: String,
    /// What limits it.
    pub bound: Bound,
    /// Whether its tensors were in the caches.
    pub in_cache: bool,
    /// What is multiplied.
    pub products: Option<String>,
    /// The numbers.
    #[serde(flatten)]
    pub row: Row,
}

/// Spans with the same name.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct SpanRow {
    /// Their name.
    pub name: String,
    /// How many there were.
    pub count: usize,
    /// Nanoseconds of all.
    pub time_ns: f64,
    /// Part of the phase.
    pub share: f64,
}

/// How well the CPU's threads were used while kernels ran.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Threads {
    /// Threads.
    pub count: usize,
    /// Nanoseconds of work, of all threads together.
    pub work_ns: f64,
    /// Nanoseconds that threads of a loop waited, to begin or at its end.
    pub waiting_ns: f64,
    /// Nanoseconds that the other threads had nothing to do, because a kernel was not divided.
    pub undivided_ns: f64,
}

impl Threads {
    /// Part of the threads' time that was work.
    pub fn used(&self) -> f64 {
        self.work_ns / (self.work_ns + self.waiting_ns + self.undivided_ns).max(1.0)
    }
}

/// What threads did during one call.
#[derive(Debug, Clone, Copy, Default)]
struct Use {
    work: f64,
    waiting: f64,
    undivided: f64,
}

impl Summary {
    /// Of a phase.
    pub fn of(phase: &Phase) -> Summary {
        let kernels = phase.kernels();
        let wall = phase.wall() as f64;
        let busy =
            union(kernels.iter().map(|kernel| (kernel.start, kernel.end)), (phase.start, phase.end)) as f64;
        let (uses, count) = uses(phase);
        let of_form = used_by_form(phase, &uses);

        // On the CPU a kernel may call another op: what that takes is not its own time.
        let times: Vec<f64> = match phase.work.is_empty() {
            true => own_times(phase),
            false => {
                let on_host = kernels.iter().skip(phase.work.len());
                let on_host = on_host.map(|kernel| kernel.end.saturating_sub(kernel.start));
                phase.work_times().into_iter().chain(on_host).map(|time| time as f64).collect()
            }
        };
        let all: f64 = times.iter().sum();
        let mut by_kernel: BTreeMap<&str, Sum> = BTreeMap::new();
        let mut by_form: BTreeMap<usize, Sum> = BTreeMap::new();
        let mut backward_ns = 0.0;
        for (kernel, &time) in kernels.iter().zip(&times) {
            let form = kernel.form.map(|(_, form)| form);
            by_kernel.entry(&kernel.name).or_default().add(form, time, kernel.is_first);
            if let Some((at, form)) = kernel.form {
                by_form.entry(at).or_default().add(Some(form), time, kernel.is_first);
                backward_ns += if is_backward(&form.op) { time } else { 0.0 };
            }
        }
        let mut rows: Vec<Row> = by_kernel.iter().map(|(name, sum)| sum.row(name, all)).collect();
        for row in &mut rows {
            row.threads_used = of_form.get(row.kernel.as_str()).and_then(Use::used);
            if let Some(work) = phase.work.iter().find(|work| {
                work.form.map_or(work.name == row.kernel, |form| phase.forms[form].kernel == row.kernel)
            }) {
                (row.registers, row.shared_bytes) = (work.registers, work.shared_bytes);
            }
        }
        let mut forms: Vec<FormRow> = by_form
            .iter()
            .map(|(&at, sum)| {
                let form = &phase.forms[at];
                FormRow {
                    args: form.args.clone(),
                    bound: form.bound,
                    in_cache: form.in_cache,
                    products: form.products.clone(),
                    row: sum.row(&form.kernel, all),
                }
            })
            .collect();
        rows.sort_by(|a, b| b.time_ns.total_cmp(&a.time_ns));
        forms.sort_by(|a, b| b.row.time_ns.total_cmp(&a.row.time_ns));
        let used = uses.iter().fold(Use::default(), |all, one| all.and(one));
        Summary {
            wall_ns: wall,
            busy_ns: busy,
            idle_ns: wall - busy,
            kernels: rows,
            forms,
            layers: spans(phase, |kind| kind == SpanKind::Layer),
            spans: spans(phase, |kind| matches!(kind, SpanKind::Host | SpanKind::User)),
            threads: (count > 1 && used.work > 0.0).then_some(Threads {
                count,
                work_ns: used.work,
                waiting_ns: used.waiting,
                undivided_ns: used.undivided,
            }),
            backward_ns,
        }
    }

    /// The kernel by which most can be won.
    pub fn most_to_win(&self) -> Option<&Row> {
        self.kernels.iter().filter(|row| row.to_win > 0.0).max_by(|a, b| a.to_win.total_cmp(&b.to_win))
    }
}

/// Whether an op computes gradients.
fn is_backward(op: &str) -> bool {
    op.contains("backward")
}

/// Sums over launches.
#[derive(Default)]
struct Sum {
    op: String,
    time: f64,
    launches: usize,
    bytes: f64,
    flops: f64,
    limit: Option<f64>,
    without_limit: bool,
}

impl Sum {
    /// Adds a kernel. Those after the first of a call add their time alone.
    fn add(&mut self, form: Option<&Form>, time: f64, is_first: bool) {
        self.time += time;
        if !is_first {
            return;
        }
        self.launches += 1;
        let limit = form.and_then(|form| form.limit_ns);
        match limit {
            Some(limit) => *self.limit.get_or_insert(0.0) += limit,
            None => self.without_limit = true,
        }
        if let Some(form) = form {
            self.op.clone_from(&form.op);
            self.bytes += form.bytes;
            self.flops += form.flops;
        }
    }

    fn row(&self, kernel: &str, all: f64) -> Row {
        let limit_ns = self.limit.filter(|_| !self.without_limit);
        let share = self.time / all.max(1.0);
        let to_win = limit_ns.map_or(0.0, |limit| share * (1.0 - limit / self.time.max(1.0)).max(0.0));
        Row {
            kernel: kernel.into(),
            op: self.op.clone(),
            time_ns: self.time,
            share,
            launches: self.launches,
            bytes: self.bytes,
            flops: self.flops,
            limit_ns,
            to_win,
            ..Row::default()
        }
    }
}

/// How long each call took without the calls inside of it.
fn own_times(phase: &Phase) -> Vec<f64> {
    let mut times = vec![0.0; phase.calls.len()];
    for (_, calls) in phase.calls_by_thread() {
        let intervals: Vec<_> =
            calls.iter().map(|&at| (phase.calls[at].start, phase.calls[at].end)).collect();
        for (at, own) in calls.iter().zip(own(&intervals)) {
            times[*at] = own as f64;
        }
    }
    times
}

impl Use {
    fn and(self, other: &Use) -> Use {
        Use {
            work: self.work + other.work,
            waiting: self.waiting + other.waiting,
            undivided: self.undivided + other.undivided,
        }
    }

    fn used(&self) -> Option<f64> {
        let all = self.work + self.waiting + self.undivided;
        (all > 0.0).then(|| self.work / all)
    }
}

/// What threads did during each call, and how many there are. Zeros where nothing ran on the CPU.
fn uses(phase: &Phase) -> (Vec<Use>, usize) {
    let mut worked: HashMap<u64, f64> = HashMap::new();
    for part in &phase.parts {
        *worked.entry(part.id).or_default() += part.end.saturating_sub(part.start) as f64;
    }
    let of_loops = phase.loops.iter().map(|one| one.threads as usize).max().unwrap_or(0);
    let count = of_loops.max(phase.cpu_threads);
    let mut uses = vec![Use::default(); phase.calls.len()];
    let mut divided = vec![0.0; phase.calls.len()];
    for (one, call) in phase.loops.iter().zip(phase.calls_of_loops()) {
        let Some(at) = call else { continue };
        let time = one.end.saturating_sub(one.start) as f64;
        let work = worked.get(&one.id).copied().unwrap_or(0.0);
        uses[at].work += work;
        uses[at].waiting += (time * f64::from(one.threads) - work).max(0.0);
        divided[at] += time;
    }
    for (at, own) in own_times(phase).into_iter().enumerate() {
        if phase.forms[phase.calls[at].form].device == "cpu" {
            let alone = (own - divided[at]).max(0.0);
            uses[at].work += alone;
            uses[at].undivided += alone * count.saturating_sub(1) as f64;
        }
    }
    (uses, count)
}

/// What threads did, by kernel.
fn used_by_form<'a>(phase: &'a Phase, uses: &[Use]) -> HashMap<&'a str, Use> {
    let mut all: HashMap<&str, Use> = HashMap::new();
    for (call, one) in phase.calls.iter().zip(uses) {
        let sum = all.entry(&phase.forms[call.form].kernel).or_default();
        *sum = sum.and(one);
    }
    all
}

/// Spans of some kinds, those with one name together, by when the first began.
fn spans(phase: &Phase, wanted: impl Fn(SpanKind) -> bool) -> Vec<SpanRow> {
    let mut rows: Vec<SpanRow> = Vec::new();
    let mut places: HashMap<&str, usize> = HashMap::new();
    for span in phase.spans.iter().filter(|span| wanted(span.kind)) {
        let place = *places.entry(&span.name).or_insert_with(|| {
            rows.push(SpanRow { name: span.name.clone(), ..SpanRow::default() });
            rows.len() - 1
        });
        rows[place].count += 1;
        rows[place].time_ns += span.end.saturating_sub(span.start) as f64;
    }
    for row in &mut rows {
        row.share = row.time_ns / (phase.wall() as f64).max(1.0);
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Call, Loop, Part};
    use crate::sample::sample;

    #[test]
    fn busy_and_idle_add_up_and_shares_are_of_the_kernels() {
        let profile = sample();
        for phase in &profile.phases {
            let summary = Summary::of(phase);
            assert_eq!(summary.busy_ns + summary.idle_ns, summary.wall_ns, "{}", phase.name);
            assert!(summary.busy_ns > 0.0 && summary.idle_ns > 0.0);
            let shares: f64 = summary.kernels.iter().map(|row| row.share).sum();
            assert!((shares - 1.0).abs() < 1e-9, "{shares}");
            assert!(summary.kernels.windows(2).all(|pair| pair[0].time_ns >= pair[1].time_ns));
            let launches: usize = summary.kernels.iter().map(|row| row.launches).sum();
            assert_eq!(launches, phase.kernels().len());
        }
    }

    #[test]
    fn limits_and_what_is_to_win_follow_from_the_forms() {
        let form = |kernel: &str, limit_ns| Form {
            op: "linear".into(),
            kernel: kernel.into(),
            device: "cpu".into(),
            bytes: 10.0,
            limit_ns,
            ..Form::default()
        };
        let call = |form, start, end| Call { form, start, end, ..Call::default() };
        let phase = Phase {
            end: 100,
            forms: vec![form("a", Some(10.0)), form("b", None)],
            // The call of `b` is inside of one of `a`.
            calls: vec![call(0, 0, 40), call(1, 10, 20), call(0, 50, 60)],
            ..Phase::default()
        };
        let summary = Summary::of(&phase);
        assert_eq!((summary.busy_ns, summary.idle_ns), (50.0, 50.0));
        let [a, b] = &summary.kernels[..] else { panic!("{:?}", summary.kernels) };
        assert_eq!((a.kernel.as_str(), a.time_ns, a.launches, a.bytes), ("a", 40.0, 2, 20.0));
        assert_eq!((a.of_limit(), a.share, a.to_win), (Some(0.5), 0.8, 0.4));
        assert_eq!((b.time_ns, b.of_limit(), b.to_win), (10.0, None, 0.0));
        assert_eq!(summary.most_to_win().unwrap().kernel, "a");
        assert_eq!(summary.threads, None, "there is one thread");
        let phase = Phase { cpu_threads: 4, ..phase };
        let threads = Summary::of(&phase).threads.unwrap();
        // Nothing was divided: three of four had nothing to do.
        assert_eq!((threads.work_ns, threads.waiting_ns, threads.undivided_ns), (50.0, 0.0, 150.0));
    }

    #[test]
    fn the_time_of_threads_is_work_waiting_or_lack_of_work() {
        let phase = Phase {
            end: 100,
            forms: vec![Form { kernel: "k".into(), device: "cpu".into(), ..Form::default() }],
            calls: vec![Call { start: 10, end: 60, ..Call::default() }],
            loops: vec![
                Loop { id: 1, threads: 2, start: 20, end: 50, ..Loop::default() },
                Loop { id: 2, threads: 2, start: 70, end: 80, ..Loop::default() },
            ],
            parts: vec![
                Part { id: 1, start: 20, end: 50, ..Part::default() },
                Part { id: 1, thread: 1, start: 30, end: 45 },
            ],
            ..Phase::default()
        };
        let threads = Summary::of(&phase).threads.unwrap();
        // 30 and 15 in the loop, 20 outside; the second thread waits 15 in the loop and idles 20 outside.
        assert_eq!((threads.work_ns, threads.waiting_ns, threads.undivided_ns), (65.0, 15.0, 20.0));
        assert_eq!(threads.used(), 0.65);
    }

    #[test]
    fn gradients_are_counted_apart() {
        let profile = sample();
        let backward: f64 = profile.phases.iter().map(|phase| Summary::of(phase).backward_ns).sum();
        assert_eq!(backward, 0.0);
        let mut phase = profile.phases[0].clone();
        phase.forms[0].op = "rms_norm_backward".into();
        assert!(Summary::of(&phase).backward_ns > 0.0);
    }
}
