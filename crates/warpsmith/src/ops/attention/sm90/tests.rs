//! Tiles and how they are distributed.

use super::Tile;
use super::deal::{Deal, plan};
use crate::ops::attention::problem::{BLOCKS_KV, BLOCKS_Q, HEAD_DIMS, Packed, Problem};
use crate::ops::attention::tests::problem;
use crate::ops::attention::{BLOCK_KV, BLOCK_Q, CAUSAL, SOFTCAP, WINDOW};
use crate::tensor::DType;

#[test]
fn tiles_fit_shared_memory_and_the_copy_engine() {
    for (head_dim, paged) in HEAD_DIMS.into_iter().flat_map(|d| [(d, false), (d, true)]) {
        let tile = Tile::of(head_dim, paged);
        let mut tiles = vec![tile, tile.with_keys(64)];
        if head_dim == 128 {
            tiles.extend([tile.with_keys(80), tile.with_keys(80).wide(), tile.with_keys(64).wide()]);
        }
        if head_dim == 64 {
            tiles.extend([tile.wide(), tile.with_keys(64).wide()]);
        }
        for tile in tiles {
            assert!(tile.shared_bytes(head_dim) + tile.paged_bytes() <= 232_448, "{head_dim}: {tile:?}");
            assert!(tile.rows() <= 256 && tile.keys <= 256, "{head_dim}: {tile:?}");
        }
    }
}

#[test]
fn long_causal_calls_are_dealt_out_evenly() {
    for (batch, q_len, kv_len, heads) in [
        (32, 512, 512, 16),
        (8, 2048, 2048, 16),
        (2, 8192, 8192, 16),
        (1, 16384, 16384, 16),
        (1, 1024, 8192, 32),
    ] {
        let heads = batch * heads;
        let deal = Deal { q_len, kv_len, heads, rows: 128, keys: 128, causal: true, units: 132 };
        let plan = plan(&deal);
        assert!((1..=heads).contains(&plan.head_group), "{deal:?}");
        let evenness = deal.sum() as f64 / (plan.longest * deal.units) as f64;
        assert!(evenness > 0.95, "{deal:?}: groups of {} give {evenness}", plan.head_group);
    }
    // Three rounds of blocks are eleven tiles of 36 heads.
    let wide = Deal { q_len: 2048, kv_len: 2048, heads: 128, rows: 192, keys: 80, causal: true, units: 132 };
    assert!(plan(&wide).head_group.is_multiple_of(12));
}

#[test]
fn a_call_gets_the_blocks_it_wants_or_a_reason() {
    // Heads of 64 elements, of which three warpgroups can share a tile.
    for (block_q, block_kv) in BLOCKS_Q.into_iter().flat_map(|q| BLOCKS_KV.map(|kv| (q, kv))) {
        let wanted = [(BLOCK_Q, block_q as f64), (BLOCK_KV, block_kv as f64)];
        let p = problem(5, 7, &wanted).unwrap();
        let offered = [128, 192].contains(&block_q) && [64, 128].contains(&block_kv);
        assert_eq!(Tile::admits(&p).is_ok(), offered, "{block_q} by {block_kv}");
        if offered {
            let tile = Tile::of_call(&p, 132);
            assert_eq!((tile.rows(), tile.keys), (block_q, block_kv));
        }
    }
    let capped = problem(5, 7, &[(BLOCK_Q, 192.0), (SOFTCAP, 5.0)]).unwrap();
    assert_eq!(Tile::admits(&capped).unwrap_err(), "its blocks have 128 rows, not 192");
    // Nothing but what is wanted is decided by the caller.
    let p = problem(5, 7, &[(BLOCK_KV, 64.0)]).unwrap();
    assert_eq!(Tile::of_call(&problem(5, 7, &[]).unwrap(), 132).with_keys(64), Tile::of_call(&p, 132));
}

/// The tiles of calls with heads of 128 elements on 132 multiprocessors, as rows and keys.
fn long_head(p: Problem, dtype: DType, [batch, q_len, kv_len]: [usize; 3]) -> (usize, usize) {
    let tile =
        Tile::of_call(&Problem { dtype, head_dim: 128, num_heads: 16, batch, q_len, kv_len, ..p }, 132);
    (tile.rows(), tile.keys)
}

#[test]
fn keys_of_a_block_in_f16_do_not_depend_on_more_than_a_row_sees() {
    let [all, causal, window] =
        [&[][..], &[(CAUSAL, 1.0)], &[(WINDOW, 9.0)]].map(|options| problem(5, 7, options).unwrap());
    for (q_len, batch) in [(1, 1), (300, 2), (20_000, 1), (20_000, 32)] {
        for kv_len in [1, 1024, 1025, 100_000] {
            let keys = |p: Problem| long_head(p, DType::F16, [batch, q_len, kv_len]).1;
            assert_eq!(keys(all), if kv_len > 1024 { 80 } else { 128 }, "{q_len} by {kv_len}");
            assert_eq!([keys(causal), keys(window)], [80; 2], "{q_len} by {kv_len}");
        }
    }
}

#[test]
fn a_call_in_bf16_gets_the_fastest_tile() {
    let [all, causal] = [&[][..], &[(CAUSAL, 1.0)]].map(|options| problem(5, 7, options).unwrap());
    let tile = |p, sizes| long_head(p, DType::BF16, sizes);
    // As measured: blocks of more keys, unless larger tiles are distributed more evenly.
    for sizes in [[32, 512, 512], [16, 1024, 1024], [8, 512, 8192], [1, 512, 512], [2, 8192, 8192]] {
        assert_eq!(tile(causal, sizes), (128, 128), "{sizes:?}");
    }
    for sizes in [[32, 512, 512], [8, 2048, 2048], [2, 8192, 8192]] {
        assert_eq!(tile(all, sizes), (128, 128), "{sizes:?}");
    }
    assert_eq!(tile(all, [4, 8192, 8192]), (192, 80));
    for requests in [8, 32] {
        let packed = Problem { packed: Some(Packed { requests, q_step: 1, kv_step: 1 }), ..causal };
        assert_eq!(tile(packed, [1, 16384, 16384]), (128, 128), "{requests} requests");
    }
}

#[test]
fn a_tile_costs_the_blocks_it_sees() {
    let deal = Deal { q_len: 300, kv_len: 1000, heads: 1, rows: 128, keys: 128, causal: true, units: 132 };
    // Queries 256 to 299 end at key 1000; queries 0 to 127 at key 828.
    assert_eq!(deal.cost(2), 8 + 1);
    assert_eq!(deal.cost(0), 7 + 1);
    assert_eq!(Deal { causal: false, ..deal }.cost(0), 8 + 1);
    let beyond = Deal { q_len: 300, kv_len: 100, ..deal };
    assert_eq!(beyond.cost(0), 1);
}

#[test]
fn a_call_without_work_has_a_plan() {
    let deal = Deal { q_len: 0, kv_len: 5, heads: 2, rows: 128, keys: 128, causal: true, units: 132 };
    assert_eq!(plan(&deal).longest, 0);
    assert_eq!(plan(&Deal { q_len: 5, heads: 0, ..deal }).longest, 0);
}
