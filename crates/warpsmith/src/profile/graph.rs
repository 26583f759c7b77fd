//! Which call of a graph each kernel of its launches belongs to.
//!
//! A device numbers the nodes of a graph as they are made, keeps these numbers in the lower half of the numbers that it gives
//! its records, and gives all nodes of a launch the number of that launch. So it is enough to note, when a call has been
//! recorded, the last node of the stream: the nodes since the call before are its own.

use super::next_call;
use super::recorder::{Called, Forms};
use super::records::{DeviceWork, Recorded};
use std::collections::HashMap;
use std::sync::Arc;

/// The calls that a graph recorded.
#[derive(Default)]
pub(crate) struct GraphCalls {
    /// By their last nodes, which grow.
    calls: Vec<(u32, Arc<dyn Called>, u64)>,
    /// Whether the nodes did not grow, so that nothing can be told.
    is_unknown: bool,
}

// Without CUDA there are no graphs.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
impl GraphCalls {
    /// Notes a call whose last node is this one.
    pub fn note(&mut self, node: u64, called: Arc<dyn Called>, data: u64) {
        let node = node as u32;
        match self.calls.last() {
            // It had no kernel.
            Some((last, ..)) if *last == node => return,
            Some((last, ..)) if *last > node => self.is_unknown = true,
            _ => {}
        }
        self.calls.push((node, called, data));
    }

    pub fn is_empty(&self) -> bool {
        self.calls.is_empty()
    }

    /// The call of a node: its place.
    fn place(&self, node: u64) -> Option<usize> {
        let at = self.calls.partition_point(|(last, ..)| *last < node as u32);
        (!self.is_unknown && at < self.calls.len()).then_some(at)
    }
}

/// The launches of graphs in a session.
pub(super) struct Launches {
    launches: HashMap<u64, Arc<GraphCalls>>,
    /// What each graph recorded.
    recorded: HashMap<*const GraphCalls, Vec<Recorded>>,
    /// The number of each call of each launch.
    numbers: HashMap<(u64, usize), u64>,
}

impl Launches {
    pub fn new(launches: Vec<(u64, Arc<GraphCalls>)>, forms: &mut Forms) -> Launches {
        let mut recorded: HashMap<*const GraphCalls, Vec<Recorded>> = HashMap::new();
        for (_, graph) in &launches {
            recorded.entry(Arc::as_ptr(graph)).or_insert_with(|| {
                graph
                    .calls
                    .iter()
                    .map(|(_, called, data)| Recorded { form: forms.of(called), data: *data })
                    .collect()
            });
        }
        Launches { launches: launches.into_iter().collect(), recorded, numbers: HashMap::new() }
    }

    /// Says what a node of a graph was recorded for; its `call` is the number of the launch until then.
    pub fn resolve(&mut self, work: &mut DeviceWork) {
        if work.graph_node == 0 {
            return;
        }
        let Some(launch) = work.call.take() else { return };
        let Some(graph) = self.launches.get(&launch) else { return };
        let Some(place) = graph.place(work.graph_node) else { return };
        work.recorded = Some(self.recorded[&Arc::as_ptr(graph)][place].clone());
        work.call = Some(*self.numbers.entry((launch, place)).or_insert_with(next_call));
    }
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;
    use crate::profile::CallForm;

    struct Plan(&'static str);

    impl Called for Plan {
        fn form(&self) -> CallForm {
            CallForm {
                op: self.0,
                kernel: self.0,
                device: "cuda:0".into(),
                args: String::new(),
                bytes: 8.0,
                written: 4.0,
                flops: 0.0,
                products: None,
                tensor_bytes: 8.0,
            }
        }
    }

    fn work(call: u64, node: u64) -> DeviceWork {
        DeviceWork { call: Some(call), graph_node: node, ..DeviceWork::default() }
    }

    #[test]
    fn nodes_belong_to_the_call_that_was_recorded_with_them() {
        let mut calls = GraphCalls::default();
        let norm: Arc<dyn Called> = Arc::new(Plan("norm"));
        calls.note(0x5_0000_0001, norm.clone(), 7);
        calls.note(0x5_0000_0003, Arc::new(Plan("linear")), 8);
        // A call without a kernel.
        calls.note(0x5_0000_0003, Arc::new(Plan("copy")), 9);
        calls.note(0x5_0000_0004, norm, 10);
        let graph = Arc::new(calls);
        let mut launches = Launches::new(vec![(100, graph.clone()), (101, graph)], &mut Forms::default());
        let mut told = |call, node| {
            let mut work = work(call, node);
            launches.resolve(&mut work);
            (work.recorded.map(|recorded| (recorded.form.op, recorded.data)), work.call)
        };
        let (first, one) = told(100, 0x9_0000_0001);
        assert_eq!(first, Some(("norm", 7)));
        let (second, two) = told(100, 0x9_0000_0002);
        let (third, three) = told(100, 0x9_0000_0003);
        assert_eq!((second, third, two), (Some(("linear", 8)), Some(("linear", 8)), three));
        let (last, four) = told(101, 0x9_0000_0004);
        assert_eq!(last, Some(("norm", 10)));
        assert!(one.is_some() && two.is_some() && four.is_some() && one != two && two != four);
        let (again, other) = told(101, 0x9_0000_0001);
        assert!(again == first && other != one, "another launch is another call");
        assert_eq!(told(100, 0x9_0000_0005), (None, None), "after the last call");
        assert_eq!(told(102, 0x9_0000_0001), (None, None), "a launch of somebody else");
        assert_eq!(told(55, 0), (None, Some(55)), "no graph");
    }

    #[test]
    fn nodes_in_another_order_tell_nothing() {
        let mut calls = GraphCalls::default();
        calls.note(4, Arc::new(Plan("a")), 0);
        calls.note(2, Arc::new(Plan("b")), 0);
        assert!(!calls.is_empty());
        let mut launches = Launches::new(vec![(1, Arc::new(calls))], &mut Forms::default());
        let mut work = work(1, 2);
        launches.resolve(&mut work);
        assert_eq!((work.call, work.recorded), (None, None));
    }
}
