//! Chains of cheap operations become one step, and registers of tiles are used again when nobody needs their contents.

use super::ops::{Link, MAX_OPERANDS, chain};
use super::program::{Program, Slot, Space, Step};
use crate::op::Reduce;
use std::collections::HashMap;

pub(super) fn assign(mut program: Program) -> Program {
    link(&mut program);
    join_products(&mut program);
    find_direct(&mut program);
    share(&mut program);
    program
}

/// A chain so far: its links, its operands, and the step that it is.
#[derive(Clone)]
struct Chain {
    links: Vec<Link>,
    operands: Vec<Slot>,
    step: usize,
}

/// Joins up to three sums, differences and products, of which each uses the one before and nothing else does.
fn link(program: &mut Program) {
    let mut uses = HashMap::<Slot, usize>::new();
    let lists = program.phases.iter().flat_map(|phase| [&phase.rows, &phase.tiles]);
    for step in lists.chain([&program.columns]).flatten() {
        step.operands().iter().for_each(|slot| *uses.entry(*slot).or_default() += 1);
    }
    let kept = |slot: Slot, program: &Program| program.registers[slot as usize].space == Space::Line;
    for phase in 0..program.phases.len() {
        let steps = std::mem::take(&mut program.phases[phase].tiles);
        let mut chains: HashMap<Slot, Chain> = HashMap::new();
        let mut gone = vec![false; steps.len()];
        let mut done: Vec<Step> = steps.clone();
        for (at, step) in steps.iter().enumerate() {
            let Step::Apply { link: Some(own), to, from, count, .. } = step else { continue };
            let (own, operands) = (*own, from[..*count].to_vec());
            let mut made = Chain { links: vec![own], operands: operands.clone(), step: at };
            for (i, slot) in operands.iter().enumerate() {
                let Some(before) = chains.get(slot) else { continue };
                let free = uses.get(slot) == Some(&1) && !kept(*slot, program) && operands[1 - i] != *slot;
                if !free || before.links.len() >= 3 {
                    continue;
                }
                let own = if i == 1 && own == Link::Sub { Link::Rest } else { own };
                gone[before.step] = true;
                made.links = [&before.links[..], &[own]].concat();
                made.operands = [&before.operands[..], &[operands[1 - i]]].concat();
                break;
            }
            if let Some(f) = chain(&made.links) {
                let mut from = [0; MAX_OPERANDS];
                from[..made.operands.len()].copy_from_slice(&made.operands);
                done[at] = Step::Apply { f, link: None, to: *to, from, count: made.operands.len() };
            }
            chains.insert(*to, made);
        }
        let left = done.into_iter().zip(gone).filter(|(_, gone)| !gone).map(|(step, _)| step);
        program.phases[phase].tiles = left.collect();
    }
}

/// Sums of products that nothing else needs are computed in one step.
fn join_products(program: &mut Program) {
    let lists = program.phases.iter().flat_map(|phase| phase.rows.iter().chain(&phase.tiles));
    let used: Vec<Slot> = lists.flat_map(|step| step.operands().to_vec()).collect();
    for phase in 0..program.phases.len() {
        let steps = std::mem::take(&mut program.phases[phase].tiles);
        let mut gone = vec![false; steps.len()];
        let mut done = steps.clone();
        for (at, step) in steps.iter().enumerate() {
            let Step::Reduce { f: f @ (Reduce::Sum | Reduce::Mean), from: [product, _], to, .. } = *step
            else {
                continue;
            };
            let made = steps[..at].iter().position(|step| {
                matches!(step, Step::Apply { link: Some(Link::Mul), to, count: 2, .. } if *to == product)
            });
            let Some(made) = made else { continue };
            let Step::Apply { from: [a, b, ..], .. } = steps[made] else { continue };
            // Elements of rows are spread in some modes only, and results must not depend on the mode.
            let plain = |slot: Slot| {
                let spread = steps.iter().any(|step| matches!(step, Step::Spread { to, .. } if *to == slot));
                !spread && matches!(program.registers[slot as usize].space, Space::Tile | Space::Line)
            };
            let alone = used.iter().filter(|slot| **slot == product).count() == 1;
            if alone && plain(a) && plain(b) && program.registers[product as usize].space == Space::Tile {
                gone[made] = true;
                done[at] = Step::Reduce { f, from: [a, b], count: 2, to };
            }
        }
        let left = done.into_iter().zip(gone).filter(|(_, gone)| !gone).map(|(step, _)| step);
        program.phases[phase].tiles = left.collect();
    }
}

/// Results that are only stored as they are can be computed in place.
fn find_direct(program: &mut Program) {
    let mut found: Vec<(Slot, usize)> = vec![];
    for phase in &program.phases {
        for step in &phase.tiles {
            let Step::Store { tensor, from } = step else { continue };
            let made_here = phase
                .tiles
                .iter()
                .any(|step| matches!(step, Step::Apply { to, .. } | Step::Spread { to, .. } if to == from));
            let tile = program.registers[*from as usize].space == Space::Tile;
            if made_here && tile && !found.iter().any(|(slot, _)| slot == from) {
                found.push((*from, *tensor));
            }
        }
    }
    program.direct = found;
}

/// Gives values of tiles that are not needed at the same time one register.
fn share(program: &mut Program) {
    let mut last = HashMap::<Slot, usize>::new();
    let flat = |program: &Program| -> Vec<Step> {
        program.phases.iter().flat_map(|phase| phase.rows.iter().chain(&phase.tiles).cloned()).collect()
    };
    let steps = flat(program);
    for (at, step) in steps.iter().enumerate() {
        step.operands().iter().chain(step.result().as_ref()).for_each(|slot| {
            last.insert(*slot, at);
        });
    }
    let is_direct = |slot: Slot, program: &Program| program.direct.iter().any(|(direct, _)| *direct == slot);
    let mut names: Vec<Slot> = (0..program.registers.len() as Slot).collect();
    let mut free: Vec<Slot> = vec![];
    for (at, step) in steps.iter().enumerate() {
        let tile = |slot: Slot, program: &Program| {
            program.registers[slot as usize].space == Space::Tile && !is_direct(slot, program)
        };
        let mut ended: Vec<Slot> =
            step.operands().iter().copied().filter(|slot| tile(*slot, program) && last[slot] == at).collect();
        ended.sort_unstable();
        ended.dedup();
        // An operation may write where it reads, if elements are as wide.
        let in_place = matches!(step, Step::Apply { .. });
        if in_place {
            free.extend(ended.drain(..).map(|slot| names[slot as usize]));
        }
        let result = step.result().filter(|slot| tile(*slot, program));
        if let Some(to) = result {
            let wide = program.registers[to as usize].wide;
            let pick = free.iter().position(|slot| program.registers[*slot as usize].wide == wide);
            if let Some(pick) = pick {
                names[to as usize] = free.swap_remove(pick);
            }
        }
        free.extend(ended.into_iter().map(|slot| names[slot as usize]));
        if let Some(to) = result
            && last[&to] == at
        {
            free.push(names[to as usize]);
        }
    }
    let rename = |slot: Slot| names[slot as usize];
    let lists = program.phases.iter_mut().flat_map(|phase| [&mut phase.rows, &mut phase.tiles]);
    lists.chain([&mut program.columns]).flatten().for_each(|step| step.rename(rename));
    drop_unused(program);
}

/// Registers that no step names take no memory.
fn drop_unused(program: &mut Program) {
    let mut used = vec![false; program.registers.len()];
    let lists = program.phases.iter().flat_map(|phase| [&phase.rows, &phase.tiles]);
    for step in lists.chain([&program.columns]).flatten() {
        step.operands().iter().chain(step.result().as_ref()).for_each(|slot| used[*slot as usize] = true);
    }
    let mut names = vec![0; used.len()];
    let mut registers = vec![];
    for (slot, register) in program.registers.iter().enumerate().filter(|(slot, _)| used[*slot]) {
        names[slot] = registers.len() as Slot;
        registers.push(*register);
    }
    program.registers = registers;
    let rename = |slot: Slot| names[slot as usize];
    let lists = program.phases.iter_mut().flat_map(|phase| [&mut phase.rows, &mut phase.tiles]);
    lists.chain([&mut program.columns]).flatten().for_each(|step| step.rename(rename));
    program.numbers.retain(|(slot, _)| used[*slot as usize]);
    program.integers.retain(|(slot, _)| used[*slot as usize]);
    program.numbers.iter_mut().for_each(|(slot, _)| *slot = rename(*slot));
    program.sizes.retain(|(slot, _)| used[*slot as usize]);
    program.sizes.iter_mut().for_each(|(slot, _)| *slot = rename(*slot));
    program.integers.iter_mut().for_each(|(slot, _)| *slot = rename(*slot));
    program.direct.iter_mut().for_each(|(slot, _)| *slot = rename(*slot));
}
