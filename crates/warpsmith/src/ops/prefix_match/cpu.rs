//! `prefix_match` on the CPU: the search of the tree itself, sequences shared out over the threads.

use super::{EDGE_PAGES, EDGE_TOKENS, MATCHED, NODES, PAGES, Problem, STARTS, TABLE, TOKENS};
use crate::cpu::parallel_for;
use crate::error::{Error, Result};
use crate::op::{Args, Launch};
use crate::radix::flat::Flat;
use std::borrow::Cow;

/// Tokens a thread compares at least: less is not worth waking one.
const GRAIN: usize = 1 << 12;

pub(super) fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let (p, args) = (launch.problem, launch.args);
    let [table, edge_tokens, edge_pages] =
        [dense(args, TABLE)?, dense(args, EDGE_TOKENS)?, dense(args, EDGE_PAGES)?];
    let [tokens, starts] = [dense(args, TOKENS)?, dense(args, STARTS)?];
    check_starts(args, &starts, tokens.len())?;
    let flat = Flat {
        table: table.as_chunks().0,
        tokens: &edge_tokens,
        pages: &edge_pages,
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

/// An input as a slice; a copy of it where its elements are apart.
fn dense<'a>(args: &'a Args<'_>, index: usize) -> Result<Cow<'a, [i32]>> {
    let view = args.at(index);
    if !view.layout().is_contiguous() {
        return view.to_vec().map(Cow::Owned);
    }
    if view.layout().numel() == 0 {
        return Ok(Cow::Borrowed(&[]));
    }
    // SAFETY: the view is dense, of type i32 and aligned for it, lives as long as `args`, and is not written meanwhile.
    Ok(Cow::Borrowed(unsafe {
        std::slice::from_raw_parts(view.address() as *const i32, view.layout().numel())
    }))
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
