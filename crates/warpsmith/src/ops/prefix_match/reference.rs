//! The definition of `prefix_match`: every path of the tree, compared with every sequence from the first token on.

use super::{EDGE_PAGES, EDGE_TOKENS, MAX_PAGES, STARTS, TABLE, TOKENS};
use crate::lab::{Array, Inputs, Real};
use crate::op::Attrs;
use std::collections::{BTreeMap, BTreeSet};

/// table: [slots, 4], edge_tokens: [pages, page_size], edge_pages: [pages], tokens: [total], starts: [batch + 1] ->
/// matched: [batch], nodes: [batch], pages: [batch, max_pages].
pub fn matches<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
    let whole = |index: usize| -> Vec<i64> { inputs[index].data.iter().map(|x| x.f64() as i64).collect() };
    let [table, edge_tokens, edge_pages, tokens, starts] =
        [TABLE, EDGE_TOKENS, EDGE_PAGES, TOKENS, STARTS].map(whole);
    let (page_size, max_pages) = (inputs[EDGE_TOKENS].row_len(), attrs.int(MAX_PAGES) as usize);
    let batch = starts.len() - 1;
    // By node: its parent, and the pages of its edge.
    let edges: BTreeMap<i64, (i64, std::ops::Range<usize>)> = table
        .chunks_exact(4)
        .filter(|slot| slot[1] != 0)
        .map(|slot| (slot[1], (slot[0], slot[2] as usize..(slot[2] + slot[3]) as usize)))
        .collect();
    let mut matched: Array<R> = Array::zeros(&[batch]);
    let mut nodes = Array::zeros(&[batch]);
    let mut pages = Array { shape: vec![batch, max_pages], data: vec![R::of(-1.0); batch * max_pages] };
    // The longest paths: those of nodes that are nobody's parent.
    let parents: BTreeSet<i64> = edges.values().map(|(parent, _)| *parent).collect();
    for &leaf in edges.keys().filter(|node| !parents.contains(node)) {
        // The pages of the path: for each, the node whose edge has it, and where in the arrays it is.
        let mut path: Vec<(i64, usize)> = Vec::new();
        let mut node = leaf;
        while node != 0 {
            let (parent, run) = &edges[&node];
            path.extend(run.clone().rev().map(|page| (node, page)));
            node = *parent;
        }
        path.reverse();
        for b in 0..batch {
            let sequence = &tokens[starts[b] as usize..starts[b + 1] as usize];
            let same = |((_, page), part): &(&(i64, usize), &[i64])| {
                edge_tokens[page * page_size..(page + 1) * page_size] == **part
            };
            let common = path.iter().zip(sequence.chunks_exact(page_size)).take_while(same).count();
            if (common * page_size) as f64 > matched.data[b].f64() {
                matched.data[b] = R::of((common * page_size) as f64);
                nodes.data[b] = R::of(path[common - 1].0 as f64);
                for (i, (_, page)) in path[..common.min(max_pages)].iter().enumerate() {
                    pages.data[b * max_pages + i] = R::of(edge_pages[*page] as f64);
                }
            }
        }
    }
    vec![None, None, None, None, None, Some(matched), Some(nodes), Some(pages)]
}
