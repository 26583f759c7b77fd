//! `prefix_match` on the CPU: the search of the tree itself, with sequences divided among threads.

use super::{EDGE_PAGES, EDGE_TOKENS, MATCHED, NODES, PAGES, Problem, STARTS, TABLE, TOKENS};
use crate::cpu::parallel_for;
use crate::cpu::scratch::{self, Need, Region};
use crate::error::{Error, Result};
use crate::op::{Args, Launch};
use crate::radix::flat::Flat;

/// The fewest tokens a thread compares: less does not pay for waking a thread.
const GRAIN: usize = 1 << 12;

pub(super) fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let inputs = [TABLE, EDGE_TOKENS, EDGE_PAGES, TOKENS, STARTS];
    let need = |index: usize| Need::of::<i32>(copied(launch.args, index));
    let need = inputs.into_iter().fold(Need::default(), |all, index| all.plus(need(index)));
    scratch::with(need, |region| run_dense(launch, region))
}

/// [`run`] with copies of the inputs whose elements are apart in `region`.
fn run_dense(launch: &Launch<'_, Problem>, mut region: Region<'_>) -> Result<()> {
    let (p, args) = (launch.problem, launch.args);
    let [table, edge_tokens, edge_pages, tokens, starts] =
        [TABLE, EDGE_TOKENS, EDGE_PAGES, TOKENS, STARTS].map(|index| dense(args, index, &mut region));
    check_starts(args, starts, tokens.len())?;
    let flat = Flat {
        table: table.as_chunks().0,
        tokens: edge_tokens,
        pages: edge_pages,
        page_size: p.page_size,
        seed: p.seed,
    };
    let put = |output: usize, row: usize, column: usize, value: i32| {
        let [rows, columns] = p.strides[output];
        let offset = row as isize * rows + column as isize * columns;
        // SAFETY: `check` bound the outputs' shapes; rows are sequences, columns below `max_pages`; each is written by the
        // one thread that has the sequence.
        unsafe { (args.address(output) as *mut i32).offset(offset).write(value) };
    };
    let average = p.total.checked_div(p.batch).unwrap_or(0).max(1);
    parallel_for(p.batch, GRAIN.div_ceil(average), |sequences| {
        for b in sequences {
            let sequence = &tokens[starts[b] as usize..starts[b + 1] as usize];
            let mut column = 0;
            let found = flat.find(sequence, |start, len| {
                let count = len.min(p.max_pages - column);
                for (i, &page) in flat.pages[start..start + count].iter().enumerate() {
                    put(PAGES, b, column + i, page);
                }
                column += count;
            });
            put(MATCHED, b, 0, (found.pages * p.page_size) as i32);
            put(NODES, b, 0, found.node);
            (column..p.max_pages).for_each(|column| put(PAGES, b, column, -1));
        }
    });
    Ok(())
}

/// Elements of an input that are copied.
fn copied(args: &Args<'_>, index: usize) -> usize {
    let view = args.at(index);
    if view.layout().is_contiguous() { 0 } else { view.layout().numel() }
}

/// An input as a slice; a copy of it where its elements are apart.
fn dense<'a, 's: 'a>(args: &'a Args<'_>, index: usize, region: &mut Region<'s>) -> &'a [i32] {
    let view = args.at(index);
    let (layout, data) = (view.layout(), view.address() as *const i32);
    if !layout.is_contiguous() {
        let copy = region.slice(layout.numel());
        for (i, slot) in copy.iter_mut().enumerate() {
            // SAFETY: the view is of type i32, and this the offset of one of its elements.
            *slot = unsafe { *data.add(layout.offset_of(i)) };
        }
        return copy;
    }
    if layout.numel() == 0 {
        return &[];
    }
    // SAFETY: the view is dense, of type i32 and aligned for it, lives as long as `args`, and is not written meanwhile.
    unsafe { std::slice::from_raw_parts(data, layout.numel()) }
}

fn check_starts(args: &Args<'_>, starts: &[i32], total: usize) -> Result<()> {
    let ends = starts[1..].iter().copied().chain([i32::try_from(total).unwrap_or(i32::MAX)]);
    let wrong = starts.iter().zip(ends).position(|(&start, end)| start < 0 || start > end);
    wrong.map_or(Ok(()), |b| {
        let spec = args.spec();
        let expected = format!("numbers from 0 to {total} in ascending order");
        Err(Error::argument(spec.name, spec.args[STARTS].name, expected, format!("{} at {b}", starts[b])))
    })
}
