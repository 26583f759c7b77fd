//! `attention_backward` on the CPU, one source for all tiers.
//!
//! First each row of queries gets its `delta = sum(dout * out) - dlse`. Then two passes compute the weights anew, block by
//! block: one over the keys, which gives `dk` and `dv`, and one over the queries, which gives `dq`. A third gives `dbias`, if
//! it is asked for. Each pass is cut into jobs of some lines (`pass`), whose sums no other job adds to: so the bits of a
//! request depend neither on the others nor on the number of threads.

mod pass;
mod weights;

use super::super::cpu::add_requests;
use super::super::problem::{self, Grid as Strides, Rows};
use super::{
    BIAS, DBIAS, DK, DLSE, DOUT, DQ, DSINKS, DV, K, KV_STARTS, LSE, MASK, OUT, Problem, Q, Q_STARTS, SINKS, V,
};
use crate::cpu::attention::{Grid, Heads, Request};
use crate::cpu::gemm::{Blocks, Isa};
use crate::cpu::rows::with_float;
use crate::cpu::scratch::{self, List, Need};
use crate::cpu::{
    CpuElement, Simd, Task, Tier, dispatch, parallel_for, parallel_for_with_scratch, with_threads,
};
use crate::error::Result;
use crate::op::Launch;
use crate::tensor::DType;
use pass::{Compute, Space};
use std::marker::PhantomData;
use std::ops::Range;

/// One call: where everything is.
struct Call<'a> {
    p: &'a Problem,
    tier: Tier,
    requests: &'a [Request],
    q: Heads,
    k: Heads,
    v: Heads,
    out: Heads,
    dout: Heads,
    dq: Heads,
    dk: Heads,
    dv: Heads,
    lse: Heads,
    dlse: Option<Heads>,
    mask: Option<Grid>,
    bias: Option<(Grid, DType)>,
    dbias: Grid,
    /// What scores of rows are taken less of, and what gradients of weights are: `[batch, num_heads, q_len]`.
    base: *mut f32,
    delta: *mut f32,
}

// SAFETY: the memory is read by all threads, and each element is written by one.
unsafe impl Sync for Call<'_> {}

/// What a pass goes over.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Keys of a KV head: queries go past them.
    Keys,
    /// Queries of a head: keys go past them.
    Queries,
    /// Queries of a matrix of the bias: keys of all requests and heads that share it go past them.
    Bias,
}

/// Some lines, keys or queries, of a head of a request.
#[derive(Clone)]
struct Job {
    request: usize,
    /// The KV head, the query head, or the head of the bias.
    head: usize,
    lines: Range<usize>,
}

pub(super) fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let f = &launch.problem.forward;
    let (count, rows) = (f.requests(), f.batch * f.num_heads * f.q_len);
    scratch::with(Need::of::<Request>(count).and::<f32>(rows).and::<f32>(rows), |mut region| {
        let mut requests = region.list(count);
        add_requests(f, launch.args, [Q_STARTS, KV_STARTS], &mut requests)?;
        let [base, delta] = [region.slice(rows).as_mut_ptr(), region.slice(rows).as_mut_ptr()];
        let call = Call::new(launch, &requests, base, delta);
        let compute = || call.run(launch);
        if call.is_small() {
            with_threads(1, compute)
        } else {
            compute()
        }
        Ok(())
    })
}

impl<'a> Call<'a> {
    fn new(
        launch: &Launch<'a, Problem>,
        requests: &'a [Request],
        base: *mut f32,
        delta: *mut f32,
    ) -> Call<'a> {
        let (p, f) = (launch.problem, &launch.problem.forward);
        let heads = |index: usize, h: &problem::Heads| Heads {
            data: launch.args.address(index),
            batch: h.batch,
            token: h.token,
            head: h.head,
            dim: h.dim,
        };
        let rows = |index: usize, rows: Rows| Heads {
            data: launch.args.address(index),
            batch: rows.batch,
            token: rows.query,
            head: rows.head,
            dim: 1,
        };
        let grid = |index: usize, grid: Strides| Grid {
            data: launch.args.address(index),
            batch: grid.batch,
            head: grid.head,
            query: grid.query,
            key: grid.key,
        };
        let none = Strides { batch: 0, head: 0, query: 0, key: 0, elements: 0 };
        Call {
            p,
            tier: launch.tier,
            requests,
            q: heads(Q, &f.q),
            k: heads(K, &f.k),
            v: heads(V, &f.v),
            out: heads(OUT, &f.out),
            dout: heads(DOUT, &p.dout),
            dq: heads(DQ, &p.dq),
            dk: heads(DK, &p.dk),
            dv: heads(DV, &p.dv),
            lse: rows(LSE, f.lse),
            dlse: p.dlse.map(|dlse| rows(DLSE, dlse)),
            mask: f.mask.map(|mask| grid(MASK, mask)),
            bias: f.bias.map(|bias| (grid(BIAS, bias.grid), bias.dtype)),
            dbias: grid(DBIAS, p.dbias.unwrap_or(none)),
            base,
            delta,
        }
    }

    /// Whether the calling thread alone takes less time than it takes to wake another.
    fn is_small(&self) -> bool {
        const MOST: usize = 1 << 16;
        let f = &self.p.forward;
        let pairs = self.requests.iter().map(|r| r.q_len.saturating_mul(r.kv_len));
        let pairs = pairs.fold(0, usize::saturating_add);
        pairs.saturating_mul(f.num_heads * f.head_dim) <= MOST
    }

    /// The numbers of a row's base and delta.
    fn row(&self, request: &Request, head: usize, query: usize) -> usize {
        let f = &self.p.forward;
        (request.batch * f.num_heads + head) * f.q_len + request.first_query + query
    }

    fn run(&self, launch: &Launch<'_, Problem>) {
        let f = &self.p.forward;
        with_float!(f.dtype, T => self.prepare::<T>());
        self.pass(Kind::Keys);
        self.pass(Kind::Queries);
        if self.p.dbias.is_some() {
            self.clear_bias();
            self.pass(Kind::Bias);
        }
        if let (Some(sinks), Some(dsinks)) = (f.sinks, self.p.dsinks) {
            for head in 0..f.num_heads {
                // SAFETY: `check` bound both to an element a head, this far apart.
                unsafe {
                    let sink = *(launch.args.address(SINKS) as *const f32).offset(head as isize * sinks);
                    let to = (launch.args.address(DSINKS) as *mut f32).offset(head as isize * dsinks);
                    *to = self.sink_gradient(head, sink);
                }
            }
        }
    }

    /// Fills in base and delta of all rows of requests.
    fn prepare<T: CpuElement>(&self) {
        let f = &self.p.forward;
        let rows: usize = self.requests.iter().map(|r| r.q_len).sum::<usize>();
        parallel_for(rows, 16, |range| {
            dispatch(
                self.tier,
                Deltas::<T> { call: self, tokens: range, heads: f.num_heads, t: PhantomData },
            );
        });
    }

    /// `-sum(exp(sink - lse) * delta)` over the queries of a head.
    fn sink_gradient(&self, head: usize, sink: f32) -> f32 {
        let mut sum = 0f64;
        for request in self.requests {
            for query in 0..request.q_len {
                let row = self.row(request, head, query);
                // SAFETY: there is a number for each row.
                let (base, delta) = unsafe { (*self.base.add(row), *self.delta.add(row)) };
                sum += f64::from((sink - base).exp()) * f64::from(delta);
            }
        }
        0.0 - sum as f32
    }

    /// Fills the gradient of the bias with zeros, which its pass adds to.
    fn clear_bias(&self) {
        let f = &self.p.forward;
        let Grid { data, batch, head, query, key } = self.dbias;
        let heads = self.p.bias_heads;
        parallel_for(self.p.bias_batch * heads * f.q_len, 64, |range| {
            for line in range {
                let (b, h, i) = (line / f.q_len / heads, line / f.q_len % heads, line % f.q_len);
                let first = b as isize * batch + h as isize * head + i as isize * query;
                for j in 0..f.kv_len {
                    // SAFETY: `check` bound the tensor to these sizes and strides.
                    unsafe { *(data as *mut f32).offset(first + j as isize * key) = 0.0 };
                }
            }
        });
    }

    /// Goes over all keys, or all queries.
    fn pass(&self, kind: Kind) {
        let f = &self.p.forward;
        let blocks = Blocks::new(Isa::of_tier(self.tier), f.dtype);
        let space = Space::new(f, &blocks, kind);
        let lines = |request: &Request| if kind == Kind::Keys { request.kv_len } else { request.q_len };
        // The bias is one for all requests, or has as many matrices as there are.
        let (requests, heads) = match kind {
            Kind::Keys => (self.requests, f.num_kv_heads),
            Kind::Queries => (self.requests, f.num_heads),
            Kind::Bias => (&self.requests[..self.p.bias_batch.min(self.requests.len())], self.p.bias_heads),
        };
        let count = requests.iter().map(|r| lines(r).div_ceil(space.lines)).sum::<usize>() * heads;
        scratch::with(Need::of::<Job>(count), |mut region| {
            let mut jobs: List<'_, Job> = region.list(count);
            for (index, request) in requests.iter().enumerate() {
                let len = lines(request);
                for tile in 0..len.div_ceil(space.lines) {
                    // With a causal mask the first keys are seen by the most queries, and the last queries see the most keys.
                    let tile = if kind == Kind::Keys { tile } else { len.div_ceil(space.lines) - 1 - tile };
                    let lines = tile * space.lines..((tile + 1) * space.lines).min(len);
                    jobs.extend((0..heads).map(|head| Job { request: index, head, lines: lines.clone() }));
                }
            }
            let jobs = &jobs[..];
            parallel_for_with_scratch(jobs.len(), 1, space.need(), |range, region| {
                let jobs = &jobs[range];
                with_float!(f.dtype, T => {
                    dispatch(self.tier, Compute::<T> { call: self, kind, jobs, space, region, t: PhantomData })
                });
            });
        });
    }
}

/// Base and delta of all heads of some queries, counted over the requests.
struct Deltas<'a, T> {
    call: &'a Call<'a>,
    tokens: Range<usize>,
    heads: usize,
    t: PhantomData<T>,
}

impl<T: CpuElement> Task for Deltas<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let call = self.call;
        let head_dim = call.p.forward.head_dim;
        // The products `dout · v` may take subnormal factors for zero. Where their weights are large, `dp - D` is right only if
        // `D` takes the same.
        let flushes = T::DTYPE == DType::BF16 && Isa::of_tier(call.tier) >= Isa::Avx512Dot;
        let smallest = if flushes { f32::MIN_POSITIVE } else { 0.0 };
        let factor = |x: S::V| s.select(s.lt(s.abs(x), s.splat(smallest)), s.zero(), x);
        let mut before = 0;
        for request in call.requests {
            let from = self.tokens.start.max(before) - before;
            let to = self.tokens.end.min(before + request.q_len).max(before) - before;
            before += request.q_len;
            for query in from..to.max(from) {
                for head in 0..self.heads {
                    let place = [request.batch, request.first_query + query, head];
                    let row = call.row(request, head, query);
                    // SAFETY: the query is the request's, and the tensors hold its row; whole vectors make up a head.
                    unsafe {
                        let [out, dout] =
                            [&call.out, &call.dout].map(|h| h.at(size_of::<T>(), place) as *const T);
                        let sum = if call.out.dim == 1 && call.dout.dim == 1 {
                            let mut sum = s.zero();
                            let mut column = 0;
                            while column < head_dim {
                                let [a, b] = [T::load(s, out.add(column)), T::load(s, dout.add(column))];
                                sum = s.fma(factor(a), factor(b), sum);
                                column = column.wrapping_add(S::N);
                            }
                            s.reduce_add(sum)
                        } else {
                            let at = |p: *const T, step: isize, i: usize| {
                                let x = (*p.offset(i as isize * step)).to_f32();
                                if x.abs() < smallest { 0.0 } else { x }
                            };
                            let mut sum = 0.0;
                            for i in 0..head_dim {
                                sum += at(out, call.out.dim, i) * at(dout, call.dout.dim, i);
                            }
                            sum
                        };
                        let of = |heads: &Heads| *(heads.at(size_of::<f32>(), place) as *const f32);
                        let lse = of(&call.lse);
                        // Where a row has seen nothing no weight counts: all scores, if any, are minus infinity.
                        *call.base.add(row) = if lse == f32::NEG_INFINITY { f32::INFINITY } else { lse };
                        *call.delta.add(row) = call.dlse.as_ref().map_or(sum, |dlse| sum - of(dlse));
                    }
                }
            }
        }
    }
}
