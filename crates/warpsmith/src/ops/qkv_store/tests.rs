use super::*;
use crate::device::Device;
use crate::lab::proof::kernels_on;
use crate::ops::{KvStore, Rope, devices};
use crate::tensor::Tensor;

const TOKENS: usize = 6;
const HEADS: usize = 5;
const KV_HEADS: usize = 2;
const DIM: usize = 64;
const CACHE: [usize; 4] = [5, 4, KV_HEADS, DIM];
/// One token is skipped.
const PLACES: [i64; TOKENS] = [7, 0, -1, 19, 12, 8];

fn indices(values: &[i64], device: Device) -> Tensor {
    Tensor::from_slice(values, &[values.len()], device).unwrap()
}

fn bits(tensor: &Tensor) -> Vec<u8> {
    tensor.view().to_bytes().unwrap()
}

/// Without norms nothing is rounded in between: the bits are those of `rope` and `kv_store`.
#[test]
fn rotation_and_storage_give_the_bits_of_the_ops_they_are_made_of() {
    for device in devices() {
        let (slots, positions) = (indices(&PLACES, device), indices(&[5, 0, 9, 70_000, 3, 131_071], device));
        let heads = HEADS + 2 * KV_HEADS;
        let packed = Tensor::randn(&[TOKENS, heads, DIM], DType::F32, device, 3).unwrap();
        let part = |first: usize, count: usize| packed.view().narrow(1, first, count).unwrap();
        let scale = Tensor::from_slice(&[0.37f32, 2.5], &[KV_HEADS], device).unwrap();
        let queries = Rope::new(part(0, HEADS), &positions).theta(5e5).run().unwrap();
        for (kernel, to) in kernels_on(&Forward, device)
            .into_iter()
            .flat_map(|kernel| [DType::F32, DType::F8E4M3, DType::F8E5M2].map(|to| (kernel, to)))
        {
            let caches = || [0; 2].map(|_| Tensor::zeros(&CACHE, to, device).unwrap());
            let ([mut k_cache, mut v_cache], [mut k, mut v]) = (caches(), caches());
            let mut store = KvStore::new(part(HEADS, KV_HEADS), part(HEADS + KV_HEADS, KV_HEADS), &slots);
            let mut call = QkvStore::new(&slots).rope(&positions).theta(5e5).kernel(kernel.name);
            if to != DType::F32 {
                (store, call) = (store.scales(&scale, &scale), call.scales(&scale, &scale));
            }
            store.rope(&positions).theta(5e5).run(&mut k_cache, &mut v_cache).unwrap();
            let mut qkv = crate::ops::Copy::new(&packed).run().unwrap();
            call.run(&mut qkv, &mut k, &mut v).unwrap();
            let changed = qkv.view().narrow(1, 0, HEADS).unwrap().to_bytes().unwrap();
            assert_eq!(changed, bits(&queries), "{} queries", kernel.name);
            assert_eq!(bits(&k), bits(&k_cache), "{} keys {to}", kernel.name);
            assert_eq!(bits(&v), bits(&v_cache), "{} values {to}", kernel.name);
            let rest = qkv.view().narrow(1, HEADS, 2 * KV_HEADS).unwrap().to_bytes().unwrap();
            assert_eq!(rest, part(HEADS, 2 * KV_HEADS).to_bytes().unwrap(), "{} in place", kernel.name);
        }
    }
}

#[test]
fn wrong_numbers_are_named_before_anything_is_written() {
    let device = Device::Cpu;
    let tensor = |shape: &[usize]| Tensor::zeros(shape, DType::F32, device).unwrap();
    let run = |heads: usize, slot: i64, eps: f32| {
        let slots = indices(&[slot], device);
        let (mut qkv, mut k, mut v) = (tensor(&[1, heads, DIM]), tensor(&CACHE), tensor(&CACHE));
        QkvStore::new(&slots).eps(eps).run(&mut qkv, &mut k, &mut v).map_err(|error| error.to_string())
    };
    assert_eq!(run(4, 19, 0.0), Ok(()));
    let error = run(3, 0, 0.0).unwrap_err();
    assert!(
        error.contains("`qkv`") && error.contains("twice num_kv_heads=2") && error.contains('3'),
        "{error}"
    );
    let error = run(5, 20, 0.0).unwrap_err();
    assert!(error.contains("`slots`") && error.contains("20 for token 0"), "{error}");
    assert!(run(5, -2, 0.0).unwrap_err().contains("`slots`"));
    assert!(run(5, 0, -1.0).unwrap_err().contains("eps"));
    let (slots, scale) = (indices(&[0], device), tensor(&[1]));
    let (mut qkv, mut k, mut v) = (tensor(&[1, 5, DIM]), tensor(&CACHE), tensor(&CACHE));
    let error = QkvStore::new(&slots).scales(&scale, &scale).run(&mut qkv, &mut k, &mut v).unwrap_err();
    assert!(error.to_string().contains("`k_scale`") && error.to_string().contains("8-bit"), "{error}");
}
