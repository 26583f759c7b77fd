//! `warpsmith run`: an op on tensors from a file.

use crate::files;
use crate::inputs::{find_args, find_op, parse_attrs};
use safetensors::tensor::{Dtype, SafeTensors, TensorView as StoredView};
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use warpsmith::op::{Args as OpArgs, Select};
use warpsmith::{DType, Device, Error, Result, Tensor};

/// Run an op on the tensors of a safetensors file and write its results to another
///
/// The file holds one tensor for each input, named as `warpsmith list OP` names them; inputs marked optional may be
/// left out. Results are written under the names of the outputs; arguments that an op changes in part are read and
/// written. To compare with another framework, save the inputs there, run the op here, and load the results there.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The op (see `warpsmith list`)
    op: String,
    /// File with the inputs
    #[arg(long, value_name = "FILE")]
    input: PathBuf,
    /// File to write the outputs to
    #[arg(long, value_name = "FILE")]
    output: PathBuf,
    /// Set an option of the op; can be repeated
    #[arg(long = "set", value_name = "OPTION=VALUE")]
    options: Vec<String>,
    /// Also compute this optional output; can be repeated
    #[arg(long, value_name = "OUTPUT")]
    want: Vec<String>,
    /// Where to run: `cpu`, `cuda` or `cuda:N` [default: a GPU if there is one]
    #[arg(long)]
    device: Option<Device>,
    /// Use this kernel or fail (see `warpsmith explain`)
    #[arg(long)]
    kernel: Option<String>,
}

const EXAMPLES: &str = "\
Examples:
  warpsmith run rms_norm --input in.safetensors --output out.safetensors \\
      --set eps=1e-5
  warpsmith run rms_norm --input in.safetensors --output out.safetensors \\
      --want sum   # with a residual

From Python:
  safetensors.torch.save_file({\"x\": x, \"weight\": w}, \"in.safetensors\")
  subprocess.run([\"warpsmith\", \"run\", \"rms_norm\", \"--input\", \"in.safetensors\",
                  \"--output\", \"out.safetensors\"])
  out = safetensors.torch.load_file(\"out.safetensors\")[\"out\"]";

pub fn run(args: &Args) -> Result<ExitCode> {
    let op = find_op(&args.op)?;
    let spec = op.spec();
    let attrs = parse_attrs(spec, &args.options)?;
    let wanted = find_args(spec, &args.want, |arg| arg.is_output() && arg.optional, "optional output")?;
    let device = args.device.unwrap_or_else(Device::best);

    // By position in the spec: the tensors of the file, then the computed ones.
    let mut inputs: Vec<Option<Tensor>> = spec.args.iter().map(|_| None).collect();
    for (name, tensor) in read(&args.input, device)? {
        let readable: Vec<&str> = spec.args.iter().filter(|a| a.is_input()).map(|a| a.name).collect();
        let index = spec.args.iter().position(|arg| arg.is_input() && arg.name == name).ok_or_else(|| {
            let expected = format!("tensors named {}", readable.join(", "));
            Error::argument(spec.name, &name, expected, format!("`{name}` in {}", args.input.display()))
        })?;
        inputs[index] = Some(tensor);
    }
    let mut call = OpArgs::new(spec);
    for (index, input) in inputs.iter_mut().enumerate() {
        let Some(tensor) = input else { continue };
        call = match spec.args[index].is_output() {
            true => call.output(index, tensor.view_mut()),
            false => call.input(index, tensor.view()),
        };
    }
    let mut outputs = op
        .outputs(&call, &attrs, &wanted)?
        .into_iter()
        .zip(spec.args)
        .map(|(output, arg)| {
            // With such an input, kernels write only part of the output.
            let is_zeroed = arg.zeroed_with.is_some_and(|input| call.get(input).is_some());
            let make = if is_zeroed { Tensor::zeros } else { Tensor::empty };
            output.map(|(shape, dtype)| make(&shape, dtype, device)).transpose()
        })
        .collect::<Result<Vec<Option<Tensor>>>>()?;
    for (index, output) in outputs.iter_mut().enumerate() {
        if let Some(tensor) = output {
            call = call.output(index, tensor.view_mut());
        }
    }
    let select =
        Select { kernel: args.kernel.clone().map(Into::into), allow_batch_variant: args.kernel.is_some() };
    let stream = device.default_stream()?;
    let kernel = op.run(&mut call, &attrs, &stream, &select)?;
    stream.synchronize()?;

    let written = |index: usize| outputs[index].as_ref().or(inputs[index].as_ref());
    let named = spec.args.iter().enumerate().filter(|(_, arg)| arg.is_output());
    let named = named.filter_map(|(index, arg)| Some((arg.name, written(index)?)));
    let kernel = kernel.unwrap_or("nothing: the outputs are empty");
    let about = [("op", spec.name.to_string()), ("kernel", kernel.into()), ("device", device.to_string())];
    write(&args.output, named, about.map(|(name, value)| (name.to_string(), value)).into())?;
    println!("{} on {device}: ran {kernel}, wrote {}", spec.name, args.output.display());
    Ok(ExitCode::SUCCESS)
}

/// The tensors of a file, on `device`.
fn read(path: &Path, device: Device) -> Result<Vec<(String, Tensor)>> {
    let bytes = std::fs::read(path).map_err(|error| Error::io(path, "read", &error))?;
    let bad = |what: String| Error::Io { path: path.into(), what };
    if let Some(name) = repeated_name(&bytes) {
        return Err(bad(format!("it has two tensors named `{name}`")));
    }
    let file =
        SafeTensors::deserialize(&bytes).map_err(|error| bad(format!("not a safetensors file: {error}")))?;
    let mut tensors = Vec::new();
    for (name, stored) in file.tensors() {
        let dtype = DType::ALL.into_iter().find(|dtype| stored_dtype(*dtype) == stored.dtype());
        let dtype = dtype.ok_or_else(|| {
            let known: Vec<&str> = DType::ALL.iter().map(|dtype| dtype.name()).collect();
            bad(format!("`{name}` is of dtype {:?}; supported are {}", stored.dtype(), known.join(", ")))
        })?;
        tensors.push((name, Tensor::from_bytes(stored.data(), stored.shape(), dtype, device)?));
    }
    Ok(tensors)
}

/// The first duplicate name in the header of a file, of which readers silently take the last. Also `None` if the
/// header cannot be read.
fn repeated_name(file: &[u8]) -> Option<String> {
    let (length, rest) = file.split_first_chunk()?;
    let header = rest.get(..usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
    let Keys(mut names) = serde_json::from_slice(header).ok()?;
    names.sort();
    names.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0].clone())
}

/// All keys of a map, including duplicates.
struct Keys(Vec<String>);

impl<'de> Deserialize<'de> for Keys {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Keys, D::Error> {
        deserializer.deserialize_map(KeysVisitor)
    }
}

struct KeysVisitor;

impl<'de> Visitor<'de> for KeysVisitor {
    type Value = Keys;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a map")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Keys, A::Error> {
        let mut keys = Vec::new();
        while let Some((key, IgnoredAny)) = map.next_entry()? {
            keys.push(key);
        }
        Ok(Keys(keys))
    }
}

fn write<'a>(
    path: &Path,
    tensors: impl Iterator<Item = (&'static str, &'a Tensor)>,
    about: HashMap<String, String>,
) -> Result<()> {
    let data = tensors
        .map(|(name, tensor)| Ok((name, tensor, tensor.view().to_bytes()?)))
        .collect::<Result<Vec<_>>>()?;
    let bad = |error: safetensors::SafeTensorError| Error::Io { path: path.into(), what: error.to_string() };
    let views = data
        .iter()
        .map(|(name, tensor, bytes)| {
            let view = StoredView::new(stored_dtype(tensor.dtype()), tensor.shape().to_vec(), bytes);
            Ok((*name, view.map_err(bad)?))
        })
        .collect::<Result<Vec<_>>>()?;
    let bytes = safetensors::serialize(views, Some(about)).map_err(bad)?;
    files::replace(path, &bytes)
}

/// The name of a dtype in files.
fn stored_dtype(dtype: DType) -> Dtype {
    match dtype {
        DType::F32 => Dtype::F32,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::F8E4M3 => Dtype::F8_E4M3,
        DType::F8E5M2 => Dtype::F8_E5M2,
        DType::I64 => Dtype::I64,
        DType::I32 => Dtype::I32,
        DType::U8 => Dtype::U8,
        DType::Bool => Dtype::BOOL,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_dtype_survives_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("all.safetensors");
        let tensors: Vec<Tensor> = DType::ALL
            .map(|dtype| {
                Tensor::from_f64(&[1.0, 0.0, 1.0, 1.0, 0.0, 1.0], &[2, 3], dtype, Device::Cpu).unwrap()
            })
            .into();
        write(&path, DType::ALL.iter().map(|d| d.name()).zip(&tensors), HashMap::new()).unwrap();
        let mut found = read(&path, Device::Cpu).unwrap();
        found.sort_by_key(|(name, _)| DType::ALL.iter().position(|dtype| dtype.name() == name));
        assert_eq!(found.len(), DType::ALL.len());
        for ((name, tensor), dtype) in found.iter().zip(DType::ALL) {
            assert_eq!((name.as_str(), tensor.dtype(), tensor.shape()), (dtype.name(), dtype, &[2, 3][..]));
            assert_eq!(tensor.to_f64().unwrap(), [1.0, 0.0, 1.0, 1.0, 0.0, 1.0], "{dtype}");
        }
    }

    #[test]
    fn what_is_no_such_file_is_a_typed_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.safetensors");
        assert!(matches!(read(&path, Device::Cpu), Err(Error::Io { .. })));
        std::fs::write(&path, b"not tensors").unwrap();
        assert!(read(&path, Device::Cpu).unwrap_err().to_string().contains("not a safetensors file"));
        let data = 1.0f64.to_le_bytes();
        let view = StoredView::new(Dtype::F64, vec![1], &data).unwrap();
        std::fs::write(&path, safetensors::serialize([("x", view)], None).unwrap()).unwrap();
        let error = read(&path, Device::Cpu).unwrap_err().to_string();
        assert!(error.contains("F64") && error.contains("bf16"), "{error}");
    }

    #[test]
    fn a_name_for_two_tensors_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.safetensors");
        let tensor = r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4]}"#;
        for (second, refused) in [("x", true), ("y", false)] {
            // Padded to a multiple of eight, and the data.
            let mut header = format!(r#"{{"x":{tensor},"{second}":{tensor}}}"#);
            header.extend(std::iter::repeat_n(' ', header.len().next_multiple_of(8) - header.len()));
            let length = (header.len() as u64).to_le_bytes();
            std::fs::write(&path, [&length[..], header.as_bytes(), &[0; 4]].concat()).unwrap();
            let error = read(&path, Device::Cpu).err().map(|error| error.to_string()).unwrap_or_default();
            assert_eq!(error.contains("two tensors named `x`"), refused, "{error}");
        }
        for bytes in [&b""[..], &[0xff; 8], &[0xff; 99], b"\x02\0\0\0\0\0\0\0[]"] {
            assert_eq!(repeated_name(bytes), None);
        }
    }
}
