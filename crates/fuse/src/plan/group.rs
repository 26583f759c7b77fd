//! Nodes are taken in order into the kernels of their arguments, and kernels that read the same are joined.

use super::rules::refusal;
use super::{Class, Plan, Split, assemble, class, copies, domain_of, padded};
use crate::graph::{Graph, NodeId};
use crate::op::Op;
use crate::shape::{Dim, broadcast};
use std::collections::BTreeSet;

/// With more kernels than this, no pairs are looked for that read the same.
const MAX_PAIRED: usize = 64;

struct Groups<'a> {
    graph: &'a Graph,
    /// The nodes that use each node.
    users: Vec<Vec<NodeId>>,
    /// The group of each node that is computed.
    of: Vec<Option<usize>>,
    /// The nodes of each group; those of groups that were merged into others are empty.
    members: Vec<BTreeSet<NodeId>>,
}

impl Groups<'_> {
    /// Whether merging these groups, and `extra`, would make a kernel wait for itself.
    fn makes_circle(&self, merged: &[usize], extra: Option<NodeId>) -> bool {
        // From what the merged groups need, without those themselves: do they need one of them in turn?
        let mut open: Vec<usize> = vec![];
        let mut seen = BTreeSet::new();
        let needs = |id: NodeId| self.graph.node(id).args.iter().filter_map(|arg| self.of[arg.index()]);
        let members = merged.iter().flat_map(|group| &self.members[*group]).copied().chain(extra);
        open.extend(members.flat_map(needs).filter(|group| !merged.contains(group)));
        while let Some(group) = open.pop() {
            if !seen.insert(group) {
                continue;
            }
            for needed in self.members[group].iter().flat_map(|&id| needs(id)) {
                if merged.contains(&needed) {
                    return true;
                }
                open.push(needed);
            }
        }
        false
    }

    fn refusal(&self, merged: &[usize], extra: Option<NodeId>) -> Option<String> {
        let nodes = merged.iter().flat_map(|group| &self.members[*group]).copied().chain(extra).collect();
        refusal(self.graph, &self.users, &nodes).or_else(|| {
            self.makes_circle(merged, extra).then(|| "one needs what is computed between them".to_string())
        })
    }

    fn merge(&mut self, merged: &[usize]) -> usize {
        let into = merged[0];
        for &group in &merged[1..] {
            let members = std::mem::take(&mut self.members[group]);
            members.iter().for_each(|id| self.of[id.index()] = Some(into));
            self.members[into].extend(members);
        }
        into
    }
}

pub(super) fn plan(graph: &Graph) -> Plan {
    let users = users(graph);
    let mut groups = Groups { graph, users, of: vec![None; graph.nodes().len()], members: vec![] };
    let mut splits = vec![];
    for id in graph.ids().filter(|id| !graph.node(*id).op.is_leaf()) {
        let args = &graph.node(id).args;
        let mut candidates: Vec<(usize, NodeId)> =
            args.iter().filter_map(|arg| Some((groups.of[arg.index()]?, *arg))).collect();
        candidates.sort();
        candidates.reverse();
        candidates.dedup_by_key(|(group, _)| *group);
        let mut joined: Vec<usize> = vec![];
        let all: Vec<usize> = candidates.iter().map(|(group, _)| *group).collect();
        if !all.is_empty() && groups.refusal(&all, Some(id)).is_none() {
            joined = all;
        } else {
            for (group, producer) in candidates {
                let attempt = [&joined[..], &[group]].concat();
                match groups.refusal(&attempt, Some(id)) {
                    None => joined = attempt,
                    Some(why) => splits.push(Split { producer, consumer: id, why }),
                }
            }
        }
        let group = match joined.is_empty() {
            true => {
                groups.members.push(BTreeSet::new());
                groups.members.len() - 1
            }
            false => groups.merge(&joined),
        };
        groups.members[group].insert(id);
        groups.of[id.index()] = Some(group);
    }
    join_pairs(&mut groups);
    finish(&groups, splits)
}

/// Joins kernels of one domain that read the same tensor.
fn join_pairs(groups: &mut Groups<'_>) {
    let graph = groups.graph;
    let live: Vec<usize> = (0..groups.members.len()).filter(|g| !groups.members[*g].is_empty()).collect();
    if live.len() > MAX_PAIRED {
        return;
    }
    let reads = |groups: &Groups<'_>, group: usize| -> BTreeSet<NodeId> {
        let members = &groups.members[group];
        let args = members.iter().flat_map(|id| graph.node(*id).args.clone());
        args.filter(|arg| !members.contains(arg) && !graph.node(*arg).op.is_number()).collect()
    };
    for (i, &a) in live.iter().enumerate() {
        for &b in &live[i + 1..] {
            if groups.members[a].is_empty() || groups.members[b].is_empty() {
                continue;
            }
            let domain = |group: usize| domain(graph, &groups.members[group]);
            let large = |id: &NodeId| class(&graph.node(*id).shape, &domain(a)) == Class::Full;
            let shares = reads(groups, a).intersection(&reads(groups, b)).any(large);
            if domain(a) == domain(b) && shares && groups.refusal(&[a, b], None).is_none() {
                groups.merge(&[a, b]);
            }
        }
    }
}

fn users(graph: &Graph) -> Vec<Vec<NodeId>> {
    let mut users = vec![vec![]; graph.nodes().len()];
    for id in graph.ids() {
        graph.node(id).args.iter().for_each(|arg| users[arg.index()].push(id));
    }
    users
}

fn domain(graph: &Graph, nodes: &BTreeSet<NodeId>) -> Vec<Dim> {
    nodes
        .iter()
        .fold(vec![], |domain: Vec<Dim>, &id| broadcast(&domain, domain_of(graph, id)).unwrap_or(domain))
}

/// What each group writes. A value that a kernel has several times over is not written by it: others compute it again, or
/// a kernel of its own writes it.
fn finish(groups: &Groups<'_>, mut splits: Vec<Split>) -> Plan {
    let graph = groups.graph;
    let users = &groups.users;
    let mut written = BTreeSet::new();
    let mut writes: Vec<Vec<NodeId>> = vec![];
    for (group, members) in groups.members.iter().enumerate().filter(|(_, members)| !members.is_empty()) {
        let domain = domain(graph, members);
        let mut own = vec![];
        for &id in members {
            let is_output = graph.outputs().iter().any(|(_, output)| *output == id);
            let leaves = |user: &NodeId| groups.of[user.index()] != Some(group);
            if !is_output && !users[id.index()].iter().any(leaves) {
                continue;
            }
            let node = graph.node(id);
            let whole = padded(&node.shape, domain.len()) == domain;
            let reduced = matches!(node.op, Op::Reduce(_) | Op::SumTo);
            if whole || reduced || class(&node.shape, &domain) == Class::Row {
                own.push(id);
            } else if is_output || users[id.index()].iter().any(|user| graph.node(*user).op == Op::Gather) {
                writes.push(vec![id]);
                written.insert(id);
            }
        }
        written.extend(own.iter().copied());
        if !own.is_empty() {
            writes.push(own);
        }
    }
    let mut plan = assemble(graph, &writes, &written);
    plan.kernels.extend(copies(graph));
    splits.retain(|split| groups.of[split.producer.index()] != groups.of[split.consumer.index()]);
    plan.splits = splits;
    plan
}
