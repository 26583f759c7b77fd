use super::*;
use crate::device::Device;
use crate::lab::proof::kernels_on;
use crate::ops::devices;
use crate::tensor::{Random, Tensor};

fn pairs(pages: &[i64], device: Device) -> Tensor {
    Tensor::from_slice(pages, &[pages.len() / 2, 2], device).unwrap()
}

/// Memory of `shape`, seen with its dimensions in the order `order`: pages fourth from the end.
fn moves_every_bit(shape: &[usize], order: &[usize], dtype: DType) {
    // Page 1 goes to two others; the rest is skipped.
    let moves = [1, 4, 1, 0, 5, 2, -1, 3, 3, -1, 3, 3];
    let bytes = shape.iter().product::<usize>() * dtype.size();
    let mut rng = Random::new(7);
    let before: Vec<u8> = (0..bytes).map(|_| rng.bits() as u8).collect();
    for device in devices() {
        for kernel in kernels_on(&Forward, device) {
            let mut memory = Tensor::from_bytes(&before, shape, dtype, device).unwrap();
            let layout = memory.layout().permute(order);
            let page_dim = layout.rank() - 4;
            let mut want = before.clone();
            for i in 0..layout.numel() {
                let offset = layout.offset_of(i);
                let inner: usize = layout.shape()[page_dim + 1..].iter().product();
                let page = (i / inner % layout.shape()[page_dim]) as i64;
                if let Some(pair) = moves.chunks(2).find(|pair| pair[1] == page && pair[0] >= 0) {
                    let stride = layout.strides()[page_dim] as i64;
                    let source = (offset as i64 + (pair[0] - page) * stride) as usize;
                    let size = dtype.size();
                    want[offset * size..][..size].copy_from_slice(&before[source * size..][..size]);
                }
            }
            let pairs = pairs(&moves, device);
            let cache = memory.view_mut().permute(order).unwrap();
            KvCopy::new(&pairs).kernel(kernel.name).run(cache).unwrap();
            let now = memory.view().to_bytes().unwrap();
            assert!(now == want, "{} {shape:?} in order {order:?} of {dtype}", kernel.name);
        }
    }
}

#[test]
fn pages_move_bit_for_bit_whatever_the_layout() {
    for dtype in [DType::BF16, DType::F8E5M2, DType::I64] {
        // One cache; keys and values of two layers; the same, by turns in each page; heads before slots.
        moves_every_bit(&[7, 4, 2, 16], &[0, 1, 2, 3], dtype);
        moves_every_bit(&[2, 2, 7, 4, 2, 16], &[0, 1, 2, 3, 4, 5], dtype);
        moves_every_bit(&[2, 7, 2, 4, 2, 16], &[0, 2, 1, 3, 4, 5], dtype);
        moves_every_bit(&[3, 7, 2, 4, 16], &[0, 1, 3, 2, 4], dtype);
        // Pages last of all: nothing but single elements lie together.
        moves_every_bit(&[3, 4, 2, 5, 7], &[0, 4, 1, 2, 3], dtype);
    }
}

#[test]
fn a_page_is_one_run_in_any_order_and_moves_in_the_widest_accesses() {
    let pairs = pairs(&[0, 1], Device::Cpu);
    let found = |shape: &[usize], order: &[usize]| {
        let mut cache = Tensor::zeros(shape, DType::BF16, Device::Cpu).unwrap();
        let args = Args::new(&Forward::SPEC).input(PAIRS, pairs.view());
        let p = check(
            &args.output(CACHE, cache.view_mut().permute(order).unwrap()),
            &Attrs::defaults(&Forward::SPEC),
        )
        .unwrap();
        (p.run, p.runs.len(), p.width)
    };
    let page = 2 * 16 * 64;
    assert_eq!(found(&[3, 9, 2, 16, 64], &[0, 1, 3, 2, 4]), (page, 3, 16));
    assert_eq!(found(&[1, 9, 2, 16, 64], &[0, 1, 3, 2, 4]), (page, 1, 16));
    assert_eq!(found(&[9, 16, 2, 64], &[0, 1, 2, 3]), (page, 1, 16));
    assert_eq!(found(&[9, 3, 1, 5], &[0, 1, 2, 3]), (15, 1, 2));
}

#[test]
fn mistakes_are_named_before_anything_is_written() {
    let bad = |pages: &[i64], text: &str| {
        let mut cache = Tensor::randn(&[6, 2, 2, 8], DType::F32, Device::Cpu, 1).unwrap();
        let before = cache.to_f64().unwrap();
        let error = KvCopy::new(&pairs(pages, Device::Cpu)).run(&mut cache).unwrap_err().to_string();
        assert!(error.contains("`pairs`") && error.contains(text), "{error}");
        assert_eq!(cache.to_f64().unwrap(), before);
    };
    bad(&[0, 1, 2, 6], "pages from 0 to below num_pages=6, or -1, got [2, 6] as pair 1");
    bad(&[-2, 1], "[-2, 1] as pair 0");
    bad(&[0, 3, 1, 3], "page 3 as that of two pairs");
    bad(&[0, 3, 3, 4], "page 3 as both");
}

#[test]
fn a_device_skips_pages_out_of_range() {
    let Device::Cuda(_) = Device::best() else { return };
    let mut cache = Tensor::randn(&[2, 6, 2, 2, 8], DType::BF16, Device::best(), 1).unwrap();
    let before = cache.to_f64().unwrap();
    let pairs = pairs(&[0, 6, i64::MAX, 1, 2, i64::MIN, 1 << 33, 3], Device::best());
    KvCopy::new(&pairs).run(&mut cache).unwrap();
    assert_eq!(cache.to_f64().unwrap(), before);
}
