//! A row has the same bits however it is called, on every device.

use super::*;
use crate::lab::proof::kernels_on;
use crate::ops::devices;
use std::fmt;

/// What a test runs on.
#[derive(Clone, Copy)]
pub(super) struct Setting {
    pub device: Device,
    pub kernel: &'static str,
    pub dtype: DType,
    pub dim: usize,
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} elements of {}", self.kernel, self.dim, self.dtype)
    }
}

impl Setting {
    /// Every kernel of every device that can run here, with types it is for and two sizes of heads.
    pub(super) fn all() -> Vec<Setting> {
        let mut all = Vec::new();
        for device in devices() {
            for kernel in kernels_on(&Forward, device).iter().map(|kernel| kernel.name) {
                let dtypes: &[DType] = match device {
                    Device::Cpu => &FLOATS,
                    _ if kernel.ends_with("sm90") && !is_hopper(device) => &[],
                    _ if kernel.ends_with("sm90") => &[DType::F16, DType::BF16],
                    _ if kernel.ends_with("generic") || kernel.ends_with("f32") => &[DType::F32],
                    _ => &[DType::BF16],
                };
                for &dtype in dtypes {
                    // Each size is compiled for itself on a GPU.
                    let long_alone = device != Device::Cpu && dtype == DType::F16;
                    let dims: &[usize] = if long_alone { &[128] } else { &[64, 128] };
                    all.extend(dims.iter().map(|&dim| Setting { device, kernel, dtype, dim }));
                }
            }
        }
        all
    }

    /// Those whose kernels take packed requests, and any number of queries.
    pub(super) fn packed() -> Vec<Setting> {
        Setting::all().into_iter().filter(|setting| setting.most_queries() == usize::MAX).collect()
    }

    /// Queries that the kernel takes, with [`HEADS`] and [`KV_HEADS`].
    fn most_queries(&self) -> usize {
        match self.kernel {
            "attention_split" => 16,
            "attention_split_generic" => 4,
            _ => usize::MAX,
        }
    }

    pub(super) fn tensors(&self, sizes: [usize; 3]) -> Tensors {
        Tensors::random(sizes, self.dim, self.dtype, self.device)
    }

    /// A new tensor with the contents of a view.
    pub(super) fn copy(&self, view: TensorView<'_>) -> Tensor {
        Tensor::from_bytes(&view.to_bytes().unwrap(), view.shape(), self.dtype, self.device).unwrap()
    }

    /// The rows of a request that has these queries and keys, in tensors of their own.
    pub(super) fn alone(&self, views: [TensorView<'_>; 3]) -> Vec<Vec<u8>> {
        let [q, k, v] = views.map(|view| self.copy(view));
        causal(self.kernel, q.view(), k.view(), v.view())
    }
}

fn is_hopper(device: Device) -> bool {
    device.info().unwrap().arch.is_some_and(|arch| (arch.major, arch.minor) == (9, 0))
}

#[test]
fn chunks_of_queries_have_the_bits_of_the_whole() {
    // Ranges counted from the end; the last ones are for kernels of few queries.
    const CHUNKS: [[usize; 2]; 12] = [
        [300, 299],
        [300, 230],
        [230, 100],
        [100, 0],
        [255, 0],
        [171, 170],
        [171, 42],
        [16, 9],
        [9, 0],
        [4, 3],
        [3, 1],
        [1, 0],
    ];
    for setting in Setting::all() {
        // Kernels of few queries share their keys out.
        let few = setting.most_queries() < 300;
        let (count, len) = if few { (setting.most_queries(), 2100) } else { (300, 300) };
        let Tensors { q, k, v } = setting.tensors([1, count, len]);
        let whole = causal(setting.kernel, q.view(), k.view(), v.view());
        for [from, to] in CHUNKS.into_iter().filter(|[from, _]| *from <= count) {
            let (first, last, keys) = (count - from, count - to, 0..len - to);
            // What comes later is hidden by the mask anyway.
            let part = causal(setting.kernel, cut(&q, first..last), cut(&k, keys.clone()), cut(&v, keys));
            assert!(part == whole[first..last], "{setting}: queries {first}..{last} of {count}");
        }
    }
}

#[test]
fn packed_requests_have_the_bits_they_have_alone() {
    const LENS: [usize; 9] = [65, 0, 1, 129, 64, 1000, 63, 127, 0];
    let starts: Vec<i32> =
        (0..=LENS.len()).map(|request| LENS[..request].iter().sum::<usize>() as i32).collect();
    for setting in Setting::packed() {
        let packed = Tensor::from_slice(&starts, &[starts.len()], setting.device).unwrap();
        let len = LENS.iter().sum();
        let Tensors { q, k, v } = setting.tensors([1, len, len]);
        let call = Attention::new(&q, &k, &v).starts(&packed, &packed).causal().kernel(setting.kernel);
        let all = rows(call.run_with_lse().unwrap());
        for ends in starts.windows(2) {
            let own = ends[0] as usize..ends[1] as usize;
            let alone = setting.alone([&q, &k, &v].map(|tensor| cut(tensor, own.clone())));
            assert!(alone == all[own.clone()], "{setting}: tokens {own:?}");
        }
    }
}

/// Asserts that some requests of a batch have the bits they have alone.
fn assert_same_in_batches(setting: Setting, [batch, q_len, kv_len]: [usize; 3], requests: &[usize]) {
    let Tensors { q, k, v } = setting.tensors([batch, q_len, kv_len]);
    let all = causal(setting.kernel, q.view(), k.view(), v.view());
    for &request in requests {
        let own = [&q, &k, &v].map(|tensor| tensor.view().narrow(0, request, 1).unwrap());
        let alone = setting.alone(own);
        let rows = &all[request * q_len..][..q_len];
        assert!(alone == rows, "{setting}: {q_len} queries, request {request} of {batch}");
    }
}

#[test]
fn requests_of_a_batch_have_the_bits_they_have_alone() {
    for setting in Setting::all() {
        let q_len = setting.most_queries().min(300);
        assert_same_in_batches(setting, [5, q_len, 310], &[0, 1, 2, 3, 4]);
        if setting.kernel.ends_with("sm90") {
            // Enough for larger tiles than they have alone.
            assert_same_in_batches(setting, [40, 190, 190], &[0, 17, 39]);
        }
    }
}

#[test]
fn keys_that_are_not_seen_do_not_reach_a_row() {
    const LEN: usize = 40;
    for setting in Setting::all() {
        let count = setting.most_queries().min(LEN);
        let Tensors { q, k, v } = setting.tensors([1, count, LEN]);
        let clean = causal(setting.kernel, q.view(), k.view(), v.view());
        let mut values = k.to_f64().unwrap();
        // Half of the queries do not see these.
        let hidden = (LEN - count / 2) * KV_HEADS * setting.dim;
        for (i, value) in values[hidden..].iter_mut().enumerate() {
            *value = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY][i % 3];
        }
        let k = Tensor::from_f64(&values, k.shape(), setting.dtype, setting.device).unwrap();
        let out = causal(setting.kernel, q.view(), k.view(), v.view());
        let seen = count - count / 2;
        assert!(out[..seen] == clean[..seen] && out[seen..] != clean[seen..], "{setting}");
    }
}
