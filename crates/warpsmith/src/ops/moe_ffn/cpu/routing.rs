//! Who is sent where.

use crate::cpu::CpuElement;
use crate::cpu::rows::{index_at, with_float};
use crate::cpu::scratch::{Need, Region};
use crate::error::{Error, Result};
use crate::op::Args;
use crate::ops::grouped::slots::DROPPED;
use crate::ops::moe_ffn::Problem;
use crate::ops::moe_ffn::problem::{ROW_IDS, ROW_ROUTING};

/// The experts of all slots, and their weights.
#[derive(Clone, Copy)]
pub(in crate::ops::moe_ffn) struct Routing<'a> {
    pub experts: &'a [usize],
    pub weights: &'a [f32],
}

impl<'a> Routing<'a> {
    pub fn need(p: &Problem) -> Need {
        let slots = p.tokens.saturating_mul(p.top_k);
        Need::of::<usize>(slots).and::<f32>(slots)
    }

    /// Reads the routing of a call from the arguments `ids` and `weights`; an error if an id is neither an expert nor -1.
    pub fn read(
        p: &Problem,
        args: &Args<'_>,
        [ids, weights]: [usize; 2],
        region: &mut Region<'a>,
    ) -> Result<Routing<'a>> {
        let slots = p.tokens * p.top_k;
        let (experts, of) = (region.slice(slots), region.slice(slots));
        for token in 0..p.tokens {
            let offsets = p.space.offsets(token);
            for slot in 0..p.top_k {
                let at = |row: usize| offsets[row].wrapping_add(slot.wrapping_mul(p.steps[row] as usize));
                // SAFETY: the offsets of elements of these tensors, which have these types.
                let (id, weight) = unsafe {
                    let id = index_at(args.address(ids), p.id_dtype, at(ROW_IDS));
                    let weights = args.address(weights);
                    let weight = with_float!(p.weight_dtype, T => {
                        (*(weights as *const T).wrapping_add(at(ROW_ROUTING))).to_f32()
                    });
                    (id, weight)
                };
                let expert = match id {
                    -1 => Some(DROPPED),
                    _ => usize::try_from(id).ok().filter(|&id| id < p.experts),
                };
                experts[token * p.top_k + slot] = expert.ok_or_else(|| {
                    let expected = format!("-1 or ids from 0 to below experts={}", p.experts);
                    Error::argument(args.spec().name, "ids", expected, format!("{id} at [{token}, {slot}]"))
                })?;
                of[token * p.top_k + slot] = weight;
            }
        }
        Ok(Routing { experts, weights: of })
    }
}
