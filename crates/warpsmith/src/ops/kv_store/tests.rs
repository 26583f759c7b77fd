use super::*;
use crate::device::Device;
use crate::lab::proof::kernels_on;
use crate::ops::{Cast, FLOATS, Rope, devices};
use crate::tensor::{Layout, Shape, Tensor};

fn indices(values: &[i64], device: Device) -> Tensor {
    Tensor::from_slice(values, &[values.len()], device).unwrap()
}

const TOKENS: usize = 6;
const HEADS: usize = 3;
const DIM: usize = 64;
const PAGES: usize = 5;
const PAGE: usize = 4;
/// One token is skipped.
const PLACES: [i64; TOKENS] = [7, 0, -1, 19, 12, 8];
const CACHE: [usize; 4] = [PAGES, PAGE, HEADS, DIM];

/// What a cache of 0xff bytes holds after rows of a dense `[tokens, heads, dim]` tensor went to their slots.
fn scattered(rows: &Tensor, slots: &[i64]) -> Vec<u8> {
    let bytes = rows.view().to_bytes().unwrap();
    let row = HEADS * DIM * rows.dtype().size();
    let mut cache = vec![0xff; PAGES * PAGE * row];
    for (token, &slot) in slots.iter().enumerate().filter(|(_, slot)| **slot >= 0) {
        cache[slot as usize * row..][..row].copy_from_slice(&bytes[token * row..][..row]);
    }
    cache
}

fn poisoned(dtype: DType, device: Device) -> Tensor {
    let bytes = vec![0xff; CACHE.iter().product::<usize>() * dtype.size()];
    Tensor::from_bytes(&bytes, &CACHE, dtype, device).unwrap()
}

fn bits(tensor: &Tensor) -> Vec<u8> {
    tensor.view().to_bytes().unwrap()
}

#[test]
fn a_fused_call_gives_the_bits_of_its_steps() {
    for device in devices() {
        let (slots, positions) = (indices(&PLACES, device), indices(&[5, 0, 9, 70_000, 3, 131_071], device));
        for dtype in FLOATS {
            let k = Tensor::randn(&[TOKENS, HEADS, DIM], dtype, device, 3).unwrap();
            let v = Tensor::randn(&[TOKENS, HEADS, DIM], dtype, device, 4).unwrap();
            let rotated = Rope::new(&k, &positions).interleaved().rotary_dim(32).run().unwrap();
            let scale = Tensor::from_slice(&[0.37f32], &[1], device).unwrap();
            for kernel in kernels_on(&Forward, device) {
                let new = || KvStore::new(&k, &v, &slots).kernel(kernel.name);
                let (mut k_cache, mut v_cache) = (poisoned(dtype, device), poisoned(dtype, device));
                let call = new().rope(&positions).interleaved().rotary_dim(32);
                call.run(&mut k_cache, &mut v_cache).unwrap();
                assert_eq!(bits(&k_cache), scattered(&rotated, &PLACES), "{} keys {dtype}", kernel.name);
                assert_eq!(bits(&v_cache), scattered(&v, &PLACES), "{} values {dtype}", kernel.name);

                for to in [DType::F8E4M3, DType::F8E5M2] {
                    let (mut k_cache, mut v_cache) = (poisoned(to, device), poisoned(to, device));
                    new().scales(&scale, &scale).run(&mut k_cache, &mut v_cache).unwrap();
                    for (cache, x) in [(&k_cache, &k), (&v_cache, &v)] {
                        let cast = Cast::new(x).scale(&scale).inverse().run(to).unwrap();
                        assert_eq!(bits(cache), scattered(&cast, &PLACES), "{} {dtype} {to}", kernel.name);
                    }
                }
            }
        }
    }
}

/// Keys and values in a packed projection, stored in caches that take turns page by page, with slots or heads first.
#[test]
fn layouts_do_not_matter_to_a_single_bit() {
    let of = |shape: &[usize], strides: &[usize]| {
        let strides: Vec<isize> = strides.iter().map(|&s| s as isize).collect();
        Layout::strided(Shape::new(shape).unwrap(), &strides).unwrap()
    };
    let row = HEADS * DIM;
    let packed = of(&[TOKENS, HEADS, DIM], &[4 * row, DIM, 1]);
    let page = 2 * PAGE * row;
    let layouts = [of(&CACHE, &[page, row, DIM, 1]), of(&CACHE, &[page, DIM, PAGE * DIM, 1])];
    let (dtype, size) = (DType::BF16, 2);
    for device in devices() {
        let (slots, positions) = (indices(&PLACES, device), indices(&[5, 0, 9, 7, 3, 1], device));
        let qkv = Tensor::randn(&[TOKENS, 4 * row], dtype, device, 3).unwrap();
        // SAFETY: inside `qkv`, which outlives the views.
        let part = |start: usize| unsafe {
            TensorView::from_raw(qkv.view().address() + start * size, dtype, packed, device)
        };
        let (k, v) = (part(2 * row), part(3 * row));
        let dense = |x: &TensorView<'_>| {
            Tensor::from_bytes(&x.to_bytes().unwrap(), &[TOKENS, HEADS, DIM], dtype, device).unwrap()
        };
        let rotated = Rope::new(&dense(&k), &positions).run().unwrap();
        for kernel in kernels_on(&Forward, device) {
            for layout in layouts {
                let memory = poisoned(dtype, device).to_f64().unwrap();
                let memory = [&memory[..], &memory[..]].concat();
                let memory = Tensor::from_f64(&memory, &[memory.len()], dtype, device).unwrap();
                let base = memory.view().address();
                let at = |side: usize| base + side * PAGE * row * size;
                // SAFETY: both inside `memory`, in each other's gaps; nothing else uses it during the call.
                let cache = |side| unsafe { TensorViewMut::from_raw(at(side), dtype, layout, device) };
                let call = KvStore::new(k, v, &slots).rope(&positions).kernel(kernel.name);
                call.run(cache(0), cache(1)).unwrap();
                for (side, want) in [(0, &rotated), (1, &dense(&v))] {
                    let found = cache(side).as_view().to_f64().unwrap();
                    let dtype_of = |bytes: &[u8]| dtype.read(bytes);
                    let want: Vec<f64> = scattered(want, &PLACES).chunks_exact(size).map(dtype_of).collect();
                    let same =
                        |(a, b): (&f64, &f64)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
                    assert!(found.iter().zip(&want).all(same), "{} {layout:?} side {side}", kernel.name);
                }
            }
        }
    }
}

#[test]
fn of_tokens_with_one_slot_the_last_is_stored_whole() {
    // Enough tokens for several threads, were they not in order.
    let tokens = 4096;
    let values: Vec<f64> = (0..tokens).flat_map(|t| vec![t as f64; HEADS * DIM]).collect();
    for device in devices() {
        let x = Tensor::from_f64(&values, &[tokens, HEADS, DIM], DType::F32, device).unwrap();
        let slots: Vec<i64> = (0..tokens as i64).map(|t| t % (PAGES * PAGE) as i64).collect();
        let slots = indices(&slots, device);
        for kernel in kernels_on(&Forward, device) {
            let (mut k_cache, mut v_cache) = (poisoned(DType::F32, device), poisoned(DType::F32, device));
            KvStore::new(&x, &x, &slots).kernel(kernel.name).run(&mut k_cache, &mut v_cache).unwrap();
            let count = PAGES * PAGE;
            for (slot, row) in k_cache.to_f64().unwrap().chunks(HEADS * DIM).enumerate() {
                let last = (tokens - 1 - slot) / count * count + slot;
                match device {
                    Device::Cpu => assert!(row.iter().all(|&value| value == last as f64), "{}", kernel.name),
                    // One of the tokens of this slot for each element.
                    Device::Cuda(_) => assert!(row.iter().all(|&value| value as usize % count == slot)),
                }
            }
        }
    }
}

#[test]
fn a_device_skips_slots_out_of_range() {
    let Device::Cuda(_) = Device::best() else { return };
    let device = Device::best();
    let x = Tensor::randn(&[TOKENS, HEADS, DIM], DType::BF16, device, 3).unwrap();
    let slots = [(PAGES * PAGE) as i64, -2, i64::MAX, i64::MIN, 1 << 32, 3];
    let (mut k_cache, mut v_cache) = (poisoned(DType::BF16, device), poisoned(DType::BF16, device));
    KvStore::new(&x, &x, &indices(&slots, device)).run(&mut k_cache, &mut v_cache).unwrap();
    let want = scattered(&x, &[-1, -1, -1, -1, -1, 3]);
    assert!(bits(&k_cache) == want && bits(&v_cache) == want);
}

#[test]
fn mistakes_are_named() {
    let tensor = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, Device::Cpu).unwrap();
    let x = tensor(&[TOKENS, HEADS, DIM], DType::BF16);
    let at = |values: &[i64]| indices(values, Device::Cpu);
    let slots = at(&PLACES);
    let bad = |call: KvStore<'_>, to: DType, text: &str| {
        let (mut k_cache, mut v_cache) = (tensor(&CACHE, to), tensor(&CACHE, to));
        let error = call.run(&mut k_cache, &mut v_cache).unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
        assert!(bits(&k_cache).iter().all(|&byte| byte == 0));
    };
    let bf16 = DType::BF16;
    let far = at(&[0, 1, 2, 20, 4, 5]);
    bad(KvStore::new(&x, &x, &far), bf16, "below num_pages*page_size=20, or -1, got 20 for token 3");
    let negative = at(&[0, 1, -2, 3, 4, 5]);
    bad(KvStore::new(&x, &x, &negative), bf16, "`slots`");
    bad(
        KvStore::new(&x, &x, &slots),
        DType::F16,
        "`k_cache`: expected dtype bf16 or f8e4m3 or f8e5m2, got f16",
    );
    let (one, two) = (tensor(&[1], DType::F32), tensor(&[2], DType::F32));
    bad(KvStore::new(&x, &x, &slots).scales(&one, &one), bf16, "not of an 8-bit type");
    let call = KvStore::new(&x, &x, &slots);
    bad(call.scales(&one, &two), DType::F8E4M3, "`v_scale`: expected shape [1 or num_kv_heads=3], got [2]");
    let table = tensor(&[4, DIM / 2], DType::F32);
    bad(KvStore::new(&x, &x, &slots).tables(&table, &table), bf16, "`positions`: expected a tensor, because");
    let call = KvStore::new(&x, &x, &slots).rope(&slots).tables(&table, &table);
    bad(call, bf16, "`positions`: expected positions from 0 to below max_pos=4, got 7 for token 0");
    bad(KvStore::new(&x, &x, &slots).rope(&slots).rotary_dim(65), bf16, "`rotary_dim`");
    bad(KvStore::new(&x, &x, &slots).position_scale(f64::NAN), bf16, "`position_scale`");
}
