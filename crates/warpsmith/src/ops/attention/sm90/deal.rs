//! The order in which the tiles of `attention` are distributed to the blocks.

use super::Problem;
use super::tile::Tile;
use std::collections::HashMap;
use std::sync::{LazyLock, Mutex};

/// What determines how evenly the tiles of a call are distributed to `units` blocks.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(in crate::ops) struct Deal {
    pub q_len: usize,
    pub kv_len: usize,
    /// Heads of all the batch.
    pub heads: usize,
    /// Of a tile.
    pub rows: usize,
    /// Of a block.
    pub keys: usize,
    pub causal: bool,
    pub units: usize,
}

impl Deal {
    pub(super) fn of(p: &Problem, tile: &Tile, units: usize) -> Deal {
        Deal {
            q_len: p.q_len,
            kv_len: p.kv_len,
            heads: p.num_heads * p.batch,
            rows: tile.rows(),
            keys: tile.keys,
            causal: p.causal,
            units,
        }
    }

    fn m_tiles(&self) -> usize {
        self.q_len.div_ceil(self.rows)
    }

    /// Blocks of keys that tile `m` sees, plus one for the fixed work per tile.
    pub fn cost(&self, m: usize) -> usize {
        let rows = if self.causal { ((m + 1) * self.rows).min(self.q_len) } else { self.q_len };
        (rows + self.kv_len).saturating_sub(self.q_len).min(self.kv_len).div_ceil(self.keys) + 1
    }

    /// The work of the busiest block, if heads are distributed in groups of `group` as the device does it: the longest
    /// tiles of a group first, to the blocks in alternating order.
    fn longest(&self, group: usize) -> usize {
        let mut loads = vec![0; self.units];
        let mut dealt = 0;
        for first in (0..self.heads).step_by(group) {
            let heads = group.min(self.heads - first);
            for m in (0..self.m_tiles()).rev() {
                let cost = self.cost(m);
                for _ in 0..heads {
                    let (round, at) = (dealt / self.units, dealt % self.units);
                    loads[if round % 2 == 1 { self.units - 1 - at } else { at }] += cost;
                    dealt += 1;
                }
            }
        }
        loads.into_iter().max().unwrap_or(0)
    }

    /// Tiles of the block that has most.
    pub fn rounds(&self) -> f64 {
        (self.heads * self.m_tiles()).div_ceil(self.units) as f64
    }

    /// The work of all blocks.
    pub(super) fn sum(&self) -> usize {
        self.heads * (0..self.m_tiles()).map(|m| self.cost(m)).sum::<usize>()
    }
}

/// The number of tiles from which any order is even enough.
const MANY_TILES: usize = 1 << 14;
/// The gain from a smaller group, whose keys and values are in L2 at the same time.
const LOCALITY: f64 = 0.02;

/// How a call is distributed.
#[derive(Clone, Copy)]
pub(in crate::ops) struct Plan {
    /// Heads whose tiles are distributed together.
    pub head_group: usize,
    /// The work of the busiest block.
    pub longest: usize,
}

fn common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

/// Few heads are distributed together, so that the blocks that work on one head at the same time find its keys and
/// values in L2; but if tiles differ in length, enough for all blocks to get about the same.
pub(in crate::ops) fn plan(deal: &Deal) -> Plan {
    let (heads, units, m_tiles) = (deal.heads, deal.units, deal.m_tiles());
    if heads * m_tiles == 0 {
        return Plan { head_group: 1, longest: 0 };
    }
    let fill = units.div_ceil(m_tiles).min(heads);
    if heads * m_tiles > MANY_TILES {
        return Plan { head_group: fill, longest: deal.sum().div_ceil(units) };
    }
    if !deal.causal {
        return Plan { head_group: fill, longest: (heads * m_tiles).div_ceil(units) * deal.cost(0) };
    }
    static KNOWN: LazyLock<Mutex<HashMap<Deal, Plan>>> = LazyLock::new(Default::default);
    let mut known = KNOWN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if let Some(&plan) = known.get(deal) {
        return plan;
    }
    // Divisors of the number of blocks, and groups whose tiles fill whole rounds: so that rounds and groups end
    // together.
    let round = units / common_divisor(units, m_tiles);
    let parts = (1..=12).map(|part| (units * part).div_ceil(12));
    let mut groups: Vec<usize> = parts.chain((round..=units).step_by(round)).collect();
    groups.retain(|&group| group < heads);
    groups.push(heads.min(units));
    groups.sort_unstable();
    groups.dedup();
    let plans: Vec<Plan> =
        groups.into_iter().map(|group| Plan { head_group: group, longest: deal.longest(group) }).collect();
    let best = plans.iter().map(|plan| plan.longest).min().unwrap_or(0) as f64;
    let good = |plan: &&Plan| plan.longest as f64 <= best * (1.0 + LOCALITY);
    let plan = plans.iter().find(good).copied().unwrap_or(plans[0]);
    // Calls have few shapes, but a server with chunks of all lengths has many.
    if known.len() >= 1 << 12 {
        known.clear();
    }
    known.insert(*deal, plan);
    plan
}
