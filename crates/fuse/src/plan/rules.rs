//! When nodes may be one kernel, and when that pays.

use super::{Class, class, domain_of, padded};
use crate::graph::{Graph, NodeId};
use crate::op::Op;
use crate::shape::{Dim, broadcast, show};
use std::collections::BTreeSet;

/// Most operations of a kernel: registers run out beyond, and compilers take long.
pub const MAX_OPERATIONS: usize = 64;
/// Most tensors that a kernel reads.
pub const MAX_READS: usize = 16;
/// Most tensors that a kernel writes.
pub const MAX_WRITES: usize = 8;
/// Most tensors that a kernel with both reductions along rows and sums over rows reads: it keeps all of them at once.
pub const MAX_READS_OF_BOTH: usize = 8;
/// The work, in additions, that may be done again for every row instead of once.
pub const MAX_REPEATED_COST: u32 = 16;

/// Why the nodes cannot or should not be one kernel.
pub(super) fn refusal(graph: &Graph, users: &[Vec<NodeId>], nodes: &BTreeSet<NodeId>) -> Option<String> {
    let mut domain: Vec<Dim> = vec![];
    for &id in nodes {
        let own = domain_of(graph, id);
        match broadcast(&domain, own) {
            Some(joined) => domain = joined,
            None => {
                return Some(format!("{} and {} are worked through differently", show(&domain), show(own)));
            }
        }
    }
    let rank = domain.len();
    let fits = |id: NodeId| padded(domain_of(graph, id), rank) == domain;
    let mut sums: Option<Vec<Dim>> = None;
    let (mut reduces, mut repeated) = (false, 0);
    for &id in nodes {
        let node = graph.node(id);
        match node.op {
            Op::Reduce(_) if !fits(id) => {
                let (own, all) = (show(domain_of(graph, id)), show(&domain));
                return Some(format!("`{}` reduces {own}, not all of {all}", node.op.name()));
            }
            Op::Reduce(_) => reduces = true,
            Op::SumTo => {
                let shape = padded(&node.shape, rank);
                if !fits(id) || sums.replace(shape.clone()).is_some_and(|other| other != shape) {
                    return Some(
                        "sums over different dimensions go through memory in different orders".into(),
                    );
                }
                if users[id.index()].iter().any(|user| nodes.contains(user)) {
                    return Some("a sum over rows is only known when every row has been read".into());
                }
            }
            Op::Gather => {
                if !fits(id) {
                    return Some(format!("rows are gathered once, not for each of {}", show(&domain)));
                }
                if let Some(arg) = node.args.iter().find(|arg| nodes.contains(arg)) {
                    let what = graph.node(*arg).op.name();
                    return Some(format!(
                        "`{what}` must be in memory before rows are gathered from or by it"
                    ));
                }
            }
            _ if class(&node.shape, &domain) != Class::Row && !fits(id) => repeated += node.op.cost(),
            _ => {}
        }
    }
    if repeated > MAX_REPEATED_COST {
        return Some(format!(
            "{repeated} additions' worth of work would be repeated for every row of {}",
            show(&domain)
        ));
    }
    let operations = nodes.iter().filter(|id| graph.node(**id).op.cost() > 0).count();
    if operations > MAX_OPERATIONS {
        return Some(format!("a kernel has at most {MAX_OPERATIONS} operations"));
    }
    let mut reads = BTreeSet::new();
    for &id in nodes {
        let args = graph.node(id).args.iter();
        let outside = |arg: &&NodeId| !nodes.contains(arg) && !graph.node(**arg).op.is_number();
        reads.extend(args.filter(outside).copied());
    }
    let most = if reduces && sums.is_some() { MAX_READS_OF_BOTH } else { MAX_READS };
    if reads.len() > most {
        return Some(format!("it would read {} tensors, more than {most}", reads.len()));
    }
    // Nodes that come later may still join, so what they use need not be written.
    let latest = nodes.last().map_or(0, |id| id.index());
    let written = |id: &&NodeId| {
        let users = &users[id.index()];
        let is_output = graph.outputs().iter().any(|(_, output)| output == *id);
        let later = users.iter().any(|user| user.index() > latest);
        (is_output || users.iter().any(|user| !nodes.contains(user))) && !later
    };
    let writes = nodes.iter().filter(written).count();
    (writes > MAX_WRITES).then(|| format!("it would write {writes} tensors, more than {MAX_WRITES}"))
}
