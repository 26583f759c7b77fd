//! Selection of ops, kernels and cases: the options that `check` and `bench` share.

use crate::inputs::{find_args, find_op, parse_attrs, parse_sizes, plan_case};
use crate::kernels::find_kernel;
use warpsmith::lab::AnyProvable;
use warpsmith::lab::proof::kernels_on;
use warpsmith::lab::{Arrangement, Case, Values};
use warpsmith::op::{KernelInfo, OpSpec};
use warpsmith::{DType, Device, Error, Result, ops};

#[derive(clap::Args, Clone)]
pub struct Selection {
    /// The op (see `warpsmith list`) [default: all]
    op: Option<String>,
    /// Where to run: `cpu`, `cuda` or `cuda:N` [default: a GPU if there is one]
    #[arg(long)]
    device: Option<Device>,
    /// Only this kernel
    #[arg(long)]
    kernel: Option<String>,
    /// One case of this size instead of the op's own cases; sizes not given have their defaults
    #[arg(long, value_name = "SIZE=VALUE", num_args = 1..)]
    shape: Vec<String>,
    /// Only this element type
    #[arg(long)]
    dtype: Option<DType>,
    /// Set an option of the op; can be repeated
    #[arg(long = "set", value_name = "OPTION=VALUE")]
    options: Vec<String>,
    /// Give this optional argument; can be repeated
    #[arg(long = "with", value_name = "ARGUMENT")]
    with: Vec<String>,
}

impl Selection {
    /// The requested device, if it can be used.
    pub fn device(&self) -> Result<Device> {
        let device = self.device.unwrap_or_else(Device::best);
        device.info().map(|_| device)
    }

    /// The requested kernel.
    pub fn kernel(&self) -> Option<&str> {
        self.kernel.as_deref()
    }

    /// The same selection of one kernel alone.
    pub fn only(&self, kernel: &str) -> Selection {
        Selection { kernel: Some(kernel.into()), ..self.clone() }
    }

    /// Whether an op is named.
    pub fn names_an_op(&self) -> bool {
        self.op.is_some()
    }

    /// The requested element type.
    pub fn dtype(&self) -> Option<DType> {
        self.dtype
    }

    /// The requested ops: the named one, the one of the named kernel, or all.
    pub fn ops(&self) -> Result<Vec<&'static dyn AnyProvable>> {
        let of_kernel = self.kernel().map(find_kernel).transpose()?.map(|(op, _)| op);
        match (&self.op, of_kernel) {
            (Some(name), of_kernel) => {
                let op = find_op(name)?;
                match (self.kernel(), of_kernel) {
                    (Some(kernel), Some(owner)) if owner != op.spec().name => Err(Error::UnknownKernel {
                        op: op.spec().name,
                        kernel: kernel.into(),
                        known: op.kernels().iter().map(|kernel| kernel.name.into()).collect(),
                    }),
                    _ => Ok(vec![op]),
                }
            }
            (None, Some(owner)) => Ok(vec![find_op(owner)?]),
            (None, None) if self.is_one_case() => {
                Err(Error::parse("op", "the op that --shape, --set and --with are about", "no op"))
            }
            (None, None) => Ok(ops::provable()),
        }
    }

    /// The requested kernels of an op that can run on the device.
    pub fn kernels(&self, op: &dyn AnyProvable, device: Device) -> Vec<KernelInfo> {
        let wanted = |kernel: &KernelInfo| self.kernel().is_none_or(|name| name == kernel.name);
        kernels_on(op, device).into_iter().filter(wanted).collect()
    }

    /// Whether the command line describes a case of its own.
    pub fn is_one_case(&self) -> bool {
        !(self.shape.is_empty() && self.options.is_empty() && self.with.is_empty())
    }

    /// Whether only some of an op's own cases are requested.
    pub fn is_partial(&self) -> bool {
        self.is_one_case() || self.dtype.is_some()
    }

    /// The requested cases: those of `own`, or the described one in every dtype of `own`; filtered by the requested
    /// dtype.
    pub fn cases(&self, op: &'static dyn AnyProvable, own: Vec<Case>) -> Result<Vec<Case>> {
        if !self.is_one_case() {
            return Ok(own.into_iter().filter(|case| self.dtype.is_none_or(|d| d == case.dtype)).collect());
        }
        let spec = op.spec();
        let (sizes, attrs) = (parse_sizes(spec, &self.shape)?, parse_attrs(spec, &self.options)?);
        let given = find_args(spec, &self.with, |arg| arg.optional, "optional argument")?;
        let mut dtypes: Vec<DType> = match self.dtype {
            Some(dtype) => vec![dtype],
            None => own.iter().map(|case| case.dtype).collect(),
        };
        dtypes.sort();
        dtypes.dedup();
        let case = |dtype| {
            let case = Case { attrs, ..Case::new(spec, dtype).sizes(&sizes) };
            let case = given.iter().fold(case, |case, &index| case.give(index));
            plan_case(op, &case).map(|_| case)
        };
        dtypes.into_iter().map(case).collect()
    }

    /// Command-line arguments that make the same selection on `device`.
    pub fn words(&self, device: Device) -> Vec<String> {
        let mut words: Vec<String> = self.op.iter().cloned().collect();
        words.extend(["--device".into(), device.to_string()]);
        let mut option = |name: &str, values: &[String]| {
            for value in values {
                words.extend([name.to_string(), value.clone()]);
            }
        };
        option("--kernel", self.kernel.as_slice());
        option("--shape", &self.shape);
        option("--dtype", self.dtype.map(|dtype| dtype.name().to_string()).as_slice());
        option("--set", &self.options);
        option("--with", &self.with);
        words
    }
}

/// The name of a layout on the command line.
pub fn arrangement_name(arrangement: Arrangement) -> &'static str {
    match arrangement {
        Arrangement::Contiguous => "contiguous",
        Arrangement::PaddedRows => "padded",
        Arrangement::Transposed => "transposed",
        Arrangement::Misaligned => "misaligned",
        Arrangement::HeadsFirst => "heads-first",
        Arrangement::Mixed => "mixed",
    }
}

/// Reads the name of a layout.
pub fn parse_arrangement(text: &str) -> Result<Arrangement> {
    let all = [
        Arrangement::Contiguous,
        Arrangement::PaddedRows,
        Arrangement::Transposed,
        Arrangement::Misaligned,
        Arrangement::HeadsFirst,
        Arrangement::Mixed,
    ];
    parse_name("arrangement", all, arrangement_name, text)
}

/// The name of a kind of values on the command line.
pub fn values_name(values: Values) -> &'static str {
    match values {
        Values::Typical => "typical",
        Values::Large => "large",
        Values::Special => "special",
        Values::Exponents => "exponents",
        Values::Zipf => "zipf",
        Values::AllToOne => "all-to-one",
    }
}

/// Reads the name of a kind of values.
pub fn parse_values(text: &str) -> Result<Values> {
    let all =
        [Values::Typical, Values::Large, Values::Special, Values::Exponents, Values::Zipf, Values::AllToOne];
    parse_name("values", all, values_name, text)
}

/// The member of `all` with this name.
fn parse_name<T: Copy, const N: usize>(
    what: &str,
    all: [T; N],
    name: fn(T) -> &'static str,
    text: &str,
) -> Result<T> {
    let found = all.into_iter().find(|one| name(*one) == text);
    found.ok_or_else(|| Error::parse(what, all.map(name).join(", "), text))
}

/// Command-line arguments that make `warpsmith check` run exactly this case.
pub fn case_words(spec: &OpSpec, case: &Case) -> Vec<String> {
    let mut words = vec!["--shape".to_string()];
    words.extend(spec.sizes.iter().zip(&case.sizes).map(|(size, value)| format!("{}={value}", size.name)));
    words.extend(["--dtype".into(), case.dtype.name().into()]);
    for (_, arg) in spec.args.iter().enumerate().filter(|(index, _)| case.gives(*index)) {
        words.extend(["--with".into(), arg.name.into()]);
    }
    for (index, attr) in spec.attrs.iter().enumerate() {
        let value = case.attrs.value(index).text(attr.kind);
        words.extend(["--set".into(), format!("{}={value}", attr.name)]);
    }
    if case.arrangement != Arrangement::Contiguous {
        words.extend(["--arrangement".into(), arrangement_name(case.arrangement).into()]);
    }
    if case.values != Values::Typical {
        words.extend(["--values".into(), values_name(case.values).into()]);
    }
    if case.in_place {
        words.push("--in-place".into());
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        selection: Selection,
    }

    fn parse(words: &str) -> Selection {
        Line::try_parse_from(["x"].into_iter().chain(words.split_whitespace())).unwrap().selection
    }

    #[test]
    fn a_described_case_has_every_dtype_of_the_op_unless_one_is_given() {
        let op = find_op("rms_norm").unwrap();
        let selection = parse("rms_norm --shape num_tokens=3 hidden=7 --set eps=0.5 --with weight");
        let cases = selection.cases(op, op.cases()).unwrap();
        assert_eq!(cases.len(), 3);
        assert_eq!(cases[0].name(op.spec()), "num_tokens=3 hidden=7 +weight eps=0.5");
        let one = parse("rms_norm --shape num_tokens=3 --dtype bf16").cases(op, op.cases()).unwrap();
        assert_eq!((one.len(), one[0].dtype, one[0].sizes[0]), (1, DType::BF16, 3));
        let own = parse("rms_norm --dtype f16").cases(op, op.cases()).unwrap();
        assert!(own.len() > 1 && own.iter().all(|case| case.dtype == DType::F16));
        for bad in ["--shape hidden", "--shape width=3", "--set eps=x", "--with x"] {
            assert!(parse(&format!("rms_norm {bad}")).cases(op, op.cases()).is_err(), "{bad}");
        }
    }

    #[test]
    fn ops_follow_from_names_and_kernels() {
        assert_eq!(parse("").ops().unwrap().len(), ops::PROVABLE.len());
        assert_eq!(parse("--kernel layer_norm_portable").ops().unwrap()[0].spec().name, "layer_norm");
        for bad in
            ["nothing", "--kernel nothing", "rms_norm --kernel layer_norm_portable", "--shape hidden=3"]
        {
            assert!(parse(bad).ops().is_err(), "{bad}");
        }
        let op = find_op("rms_norm").unwrap();
        let kernels = parse("--kernel rms_norm_portable").kernels(op, Device::Cpu);
        assert_eq!(kernels.iter().map(|kernel| kernel.name).collect::<Vec<_>>(), ["rms_norm_portable"]);
    }

    #[test]
    fn words_select_the_same_again() {
        let line = "rms_norm --device cpu --kernel k --shape hidden=7 --shape num_tokens=3 --dtype f32 --set eps=0.5 --with weight";
        assert_eq!(parse(line).words(Device::Cpu).join(" "), line);
    }
}
