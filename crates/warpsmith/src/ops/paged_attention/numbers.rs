//! The integer arguments of a call on the CPU, where they can be checked before anything is written.

use super::problem::Shared;
use super::{GROUP_STARTS, KV_LENS, PAGE_TABLE, PREFIX_LENS, Problem, Q_STARTS};
use crate::cpu::attention::Request;
use crate::cpu::scratch::{self, List, Need};
use crate::error::{Error, Result};
use crate::op::Launch;
use std::ops::Range;

/// Reads and checks all numbers before anything is written, and adds the requests to `requests`.
pub(super) fn add_requests(launch: &Launch<'_, Problem>, requests: &mut List<'_, Request>) -> Result<()> {
    let p = launch.problem;
    let numbers = Numbers { launch };
    let mut end = 0;
    for index in 0..p.requests {
        let kv_len = numbers.at(KV_LENS, [0, p.kv_lens_step], [0, index]);
        if kv_len < 0 || kv_len as usize > p.max_keys() {
            let expected = format!("lengths from 0 to max_pages*page_size={}", p.max_keys());
            return numbers.wrong("kv_lens", expected, format!("{kv_len} for request {index}"));
        }
        let start = |index: usize| numbers.at(Q_STARTS, [0, p.q_starts_step], [0, index]);
        let (first, last) = match p.queries {
            Some(count) => ((index * count) as i32, ((index + 1) * count) as i32),
            None => (start(index), start(index + 1)),
        };
        if first < end || last < first || last as usize > p.num_tokens {
            let expected = format!("starts that ascend from 0 to at most num_tokens={}", p.num_tokens);
            return numbers.wrong("q_starts", expected, format!("{first} and {last} for request {index}"));
        }
        end = last;
        let kv_len = kv_len as usize;
        for page in 0..kv_len.div_ceil(p.page_size) {
            let id = numbers.at(PAGE_TABLE, p.page_table, [index, page]);
            if id < 0 || id as usize >= p.num_pages {
                let expected = format!("pages from 0 to below num_pages={}", p.num_pages);
                return numbers.wrong(
                    "page_table",
                    expected,
                    format!("{id} for page {page} of request {index}"),
                );
            }
        }
        requests.push(Request {
            number: index,
            batch: index,
            first_query: first as usize,
            q_len: (last - first) as usize,
            first_key: 0,
            kv_len,
        });
    }
    let Some(shared) = p.shared else { return Ok(()) };
    let count = requests.len();
    scratch::with(Need::of::<usize>(count).and::<usize>(count), |mut region| {
        let room = [region.filled(count, 0), region.slice(count)];
        numbers.judge_groups(requests, &shared, room)
    })
}

/// The integer arguments of a call.
struct Numbers<'a> {
    launch: &'a Launch<'a, Problem>,
}

impl Numbers<'_> {
    fn at(&self, arg: usize, strides: [isize; 2], [row, col]: [usize; 2]) -> i32 {
        let offset = row as isize * strides[0] + col as isize * strides[1];
        // SAFETY: callers ask for elements of the tensor, which `check` has found to be i32.
        unsafe { *(self.launch.args.address(arg) as *const i32).offset(offset) }
    }

    fn wrong<T>(&self, arg: &str, expected: String, got: String) -> Result<T> {
        Err(Error::argument(self.launch.args.spec().name, arg, expected, got))
    }

    /// Prefixes are read as part of each request here, but must really be shared.
    ///
    /// `known` holds the keys of each request that earlier levels cover, zero at first; `before` is scratch of the same
    /// length.
    fn judge_groups(
        &self,
        requests: &[Request],
        shared: &Shared,
        [known, before]: [&mut [usize]; 2],
    ) -> Result<()> {
        for level in 0..shared.levels {
            before.copy_from_slice(known);
            for group in 0..shared.groups {
                let (members, len) = self.group(requests, shared, level, group)?;
                let known = &mut known[members.clone()];
                if len > 0 && before[members.clone()].iter().any(|&keys| keys != before[members.start]) {
                    let expected = format!("groups of level {level} within those of the level before");
                    let got = format!("{} and {} for group {group}", members.start, members.end);
                    return self.wrong("group_starts", expected, got);
                }
                known.iter_mut().for_each(|keys| *keys = len.max(*keys));
            }
        }
        Ok(())
    }

    /// The requests of a group, and the keys that they share.
    fn group(
        &self,
        requests: &[Request],
        shared: &Shared,
        level: usize,
        group: usize,
    ) -> Result<(Range<usize>, usize)> {
        let p = self.launch.problem;
        let start = |group: usize| self.at(GROUP_STARTS, shared.starts, [level, group]);
        let (first, end) = (start(group), start(group + 1));
        let place = || format!("group {group} of level {level}");
        if first < 0 || end < first || end as usize > requests.len() {
            let expected = format!("starts that ascend from 0 to at most requests={}", requests.len());
            return self.wrong("group_starts", expected, format!("{first} and {end} for {}", place()));
        }
        let range = first as usize..end as usize;
        let members = &requests[range.clone()];
        let Some(leader) = members.first() else { return Ok((range, 0)) };
        let len = self.at(PREFIX_LENS, shared.lens, [level, group]);
        let most = members.iter().map(|r| r.kv_len.saturating_sub(r.q_len)).min().unwrap_or(0);
        if len < 0 || len as usize > most {
            let expected = format!("lengths from 0 to the {most} keys before the queries of its requests");
            return self.wrong("prefix_lens", expected, format!("{len} for {}", place()));
        }
        for page in 0..(len as usize).div_ceil(p.page_size) {
            let id = |r: &Request| self.at(PAGE_TABLE, p.page_table, [r.batch, page]);
            if let Some(other) = members.iter().find(|r| id(r) != id(leader)) {
                let expected = format!("page {page} to be that of request {} too", leader.batch);
                return self.wrong(
                    "page_table",
                    expected,
                    format!("{} for request {}", id(other), other.batch),
                );
            }
        }
        Ok((range, len as usize))
    }
}
