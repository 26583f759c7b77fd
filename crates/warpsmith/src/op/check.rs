//! Symbolic shape checks: sizes have names, a name means the same size in every argument of a call, and an
//! error reads like a sentence: `rms_norm: argument `weight`: expected shape [hidden=64], got [63]`.
//!
//! The shapes are those of the op's description ([`ArgSpec::shape`](crate::op::ArgSpec::shape)).

use super::shape::{Dim, Dims, Leading, ShapeSpec};
use super::spec::{AttrKind, DTypeRule, OpSpec, SizeRule, list_types};
use super::{Args, Attrs};
use crate::error::{Error, Result};
use crate::tensor::DType;
use std::fmt::Display;

/// Collects the named sizes of one call.
pub struct Matcher<'c> {
    args: &'c Args<'c>,
    attrs: &'c Attrs,
    spec: &'static OpSpec,
    sizes: Vec<(&'static str, usize)>,
    leading: Option<Vec<usize>>,
    /// A bit for each argument that has been matched.
    matched: u32,
}

impl<'c> Matcher<'c> {
    /// A matcher that knows no sizes yet.
    pub fn new(args: &'c Args<'c>, attrs: &'c Attrs) -> Self {
        Matcher::by(args.spec(), args, attrs)
    }

    /// The same, for arguments that were made for a compatible description.
    pub(super) fn by(spec: &'static OpSpec, args: &'c Args<'c>, attrs: &'c Attrs) -> Self {
        Matcher { args, attrs, spec, sizes: Vec::new(), leading: None, matched: 0 }
    }

    /// A matcher that all arguments of the call have passed.
    pub fn of(args: &'c Args<'c>, attrs: &'c Attrs) -> Result<Self> {
        let mut matcher = Matcher::new(args, attrs);
        matcher.all()?;
        Ok(matcher)
    }

    /// Matches all remaining arguments: shapes, types, and which are given together.
    pub fn all(&mut self) -> Result<()> {
        for (index, arg) in self.spec.args.iter().enumerate() {
            if let Some(other) = arg.with {
                self.together(index, other)?;
            }
        }
        (0..self.spec.args.len()).try_for_each(|index| self.arg(index))
    }

    /// Matches one argument, if it is given and has not been matched before.
    pub fn arg(&mut self, index: usize) -> Result<()> {
        let Some(view) = self.args.get(index).filter(|_| self.matched & (1 << index) == 0) else {
            return Ok(());
        };
        let arg = &self.spec.args[index];
        self.dtype(index)?;
        self.shape(arg.name, &arg.shape, view.shape())?;
        self.matched |= 1 << index;
        Ok(())
    }

    /// Requires the type of a given argument to be one it may have, given the others.
    fn dtype(&self, index: usize) -> Result<()> {
        let (arg, got) = (&self.spec.args[index], self.args.at(index).dtype());
        let allowed = match arg.dtype {
            DTypeRule::OneOf(types) | DTypeRule::Chosen { types, .. } => types.to_vec(),
            DTypeRule::Same(other) | DTypeRule::SameOr(other, _) | DTypeRule::With(other, _) => {
                let Some(same) = self.args.get(other).map(|view| view.dtype()) else { return Ok(()) };
                match arg.dtype {
                    DTypeRule::SameOr(_, types) if !types.contains(&same) => [&[same], types].concat(),
                    DTypeRule::SameOr(_, types) => types.to_vec(),
                    DTypeRule::With(_, listed) => listed
                        .iter()
                        .find(|(of, _)| *of == same)
                        .map_or_else(|| vec![same], |(_, types)| types.to_vec()),
                    _ => vec![same],
                }
            }
        };
        if allowed.contains(&got) {
            return Ok(());
        }
        let expected = format!("dtype {}", list_types(&allowed));
        Err(Error::argument(self.spec.name, arg.name, expected, got.name()))
    }

    /// The type of an output where it is allocated for the call.
    pub(super) fn allocated_dtype(&self, index: usize) -> Result<DType> {
        let arg = &self.spec.args[index];
        let like = |other: usize| match self.args.get(other) {
            Some(view) => Ok(view.dtype()),
            // An output that follows another one.
            None if self.spec.args[other].is_output() && other != index => self.allocated_dtype(other),
            None => Err(Error::argument(self.spec.name, self.spec.args[other].name, "a tensor", "nothing")),
        };
        match arg.dtype {
            DTypeRule::OneOf(types) => Ok(types[0]),
            DTypeRule::Same(other) | DTypeRule::SameOr(other, _) | DTypeRule::With(other, _) => like(other),
            DTypeRule::Chosen { types, option, like: other } => {
                let AttrKind::Choice(names) = self.spec.attrs[option].kind else { return like(other) };
                if let Ok(dtype) = names[self.attrs.choice(option)].parse() {
                    return Ok(dtype);
                }
                let dtype = like(other)?;
                Ok(if types.contains(&dtype) { dtype } else { DType::BF16 })
            }
        }
    }

    /// Matches a shape that `arg` has.
    pub fn shape(&mut self, arg: &str, spec: &ShapeSpec, shape: &[usize]) -> Result<()> {
        let forms = match spec.option {
            Some(option) => std::slice::from_ref(&spec.forms[self.attrs.choice(option)]),
            None => spec.forms,
        };
        for form in forms {
            if let Some(found) = self.fit(form, shape)? {
                // Bound only after the whole shape fits, so that an error shows what was known before this argument.
                self.sizes.extend(found);
                if form.leading == Leading::Rows && self.leading.is_none() {
                    self.leading = Some(shape[..shape.len() - form.dims.len()].to_vec());
                }
                return Ok(());
            }
        }
        let expected: Vec<String> = forms.iter().flat_map(|form| self.expected(form)).collect();
        let because = spec.option.map_or(String::new(), |option| {
            let attr = &self.spec.attrs[option];
            format!(" with {}={}", attr.name, self.attrs.value(option).text(attr.kind))
        });
        let expected = format!("shape {}{because}", expected.join(" or "));
        Err(Error::argument(self.spec.name, arg, expected, format!("{shape:?}")))
    }

    /// The sizes that a shape determines, if it fits.
    fn fit(&self, form: &Dims, shape: &[usize]) -> Result<Option<Vec<(&'static str, usize)>>> {
        let Some(extra) = shape.len().checked_sub(form.dims.len()) else { return Ok(None) };
        let (leading, rest) = shape.split_at(extra);
        let fits = match form.leading {
            Leading::None => leading.is_empty(),
            Leading::Rows => self.leading.as_deref().is_none_or(|known| known == leading),
            Leading::Matrices => leading.is_empty() || leading == self.matrices(),
        };
        if !fits {
            return Ok(None);
        }
        let mut found: Vec<(&'static str, usize)> = Vec::new();
        for (dim, &size) in form.dims.iter().zip(rest) {
            let known = match dim.name() {
                None => Some(0),
                Some(name) => match found.iter().find(|(other, _)| *other == name) {
                    Some((_, size)) => Some(*size),
                    None => self.lookup(name)?,
                },
            };
            match known {
                _ if size == 1 && matches!(dim, Dim::OneOr(_)) => {}
                Some(known) if dim.evaluate(known) == Some(size) => {}
                Some(_) => return Ok(None),
                None => match (dim.name(), dim.solve(size)) {
                    (Some(name), Some(known)) => found.push((name, known)),
                    _ => return Ok(None),
                },
            }
        }
        Ok(Some(found))
    }

    /// The leading dimensions but the last.
    fn matrices(&self) -> &[usize] {
        self.leading.as_deref().and_then(|leading| leading.split_last()).map_or(&[], |(_, rest)| rest)
    }

    /// The expected shape in an error: each dimension with its size, where that is known.
    fn expected(&self, form: &Dims) -> Vec<String> {
        let dims: Vec<String> = form
            .dims
            .iter()
            .map(|dim| {
                let known = dim.name().and_then(|name| self.lookup(name).ok()?);
                match known.and_then(|known| dim.evaluate(known)) {
                    Some(size) => format!("{dim}={size}"),
                    None => dim.to_string(),
                }
            })
            .collect();
        let with = |leading: &[usize]| {
            let parts: Vec<String> =
                leading.iter().map(usize::to_string).chain(dims.iter().cloned()).collect();
            format!("[{}]", parts.join(", "))
        };
        match (form.leading, &self.leading) {
            (Leading::Rows, None) => {
                vec![format!("[{}]", [&["...".to_string()], &dims[..]].concat().join(", "))]
            }
            (Leading::Rows, Some(known)) => vec![with(known)],
            (Leading::Matrices, _) if !self.matrices().is_empty() => vec![with(&[]), with(self.matrices())],
            _ => vec![with(&[])],
        }
    }

    /// A size bound by an earlier argument or decided by an option; an error if the option cannot be a size.
    fn lookup(&self, name: &str) -> Result<Option<usize>> {
        if let Some(size) = self.get(name) {
            return Ok(Some(size));
        }
        let Some(derived) = self.spec.derived.iter().find(|derived| derived.name == name) else {
            return Ok(None);
        };
        let whole = |option: usize, most: usize| {
            let value = self.attrs.int(option);
            usize::try_from(value).ok().filter(|&size| size <= most).ok_or_else(|| {
                let expected = format!("a whole number from 0 to {most}");
                Error::argument(self.spec.name, self.spec.attrs[option].name, expected, value.to_string())
            })
        };
        match derived.rule {
            SizeRule::Option { option, most } => whole(option, most).map(Some),
            SizeRule::OptionOr { option, size } => match whole(option, i64::MAX as usize)? {
                0 => self.lookup(size),
                value => Ok(Some(value)),
            },
            SizeRule::Divided { size, option, by } => {
                Ok(self.lookup(size)?.map(|size| size / by[self.attrs.choice(option)]))
            }
            SizeRule::Else { size, or } => match self.get(size) {
                None => self.lookup(or),
                known => Ok(known),
            },
        }
    }

    /// A size bound by an earlier argument.
    pub fn get(&self, name: &str) -> Option<usize> {
        self.sizes.iter().find(|(known, _)| *known == name).map(|(_, size)| *size)
    }

    /// A size that the arguments matched so far are known to have bound.
    ///
    /// # Panics
    /// If no shape of this op mentions `name`: a mistake in the op, not in the call.
    pub fn size(&self, name: &str) -> usize {
        let known = self.lookup(name).ok().flatten();
        known.unwrap_or_else(|| panic!("{}: no shape binds `{name}`", self.spec.name))
    }

    /// Product of the leading dimensions.
    pub fn leading_count(&self) -> usize {
        self.leading.iter().flatten().product()
    }

    /// Number of leading dimensions.
    pub fn leading_rank(&self) -> usize {
        self.leading.as_ref().map_or(0, Vec::len)
    }

    /// The shape of an output where it is allocated for the call, from the sizes known.
    pub(super) fn allocated_shape(&self, index: usize) -> Result<Vec<usize>> {
        let arg = &self.spec.args[index];
        let form = &arg.shape.forms[arg.shape.option.map_or(0, |option| self.attrs.choice(option))];
        let mut shape = match (form.leading, &self.leading) {
            (Leading::Rows, Some(leading)) => Some(leading.clone()),
            (Leading::Rows, None) => None,
            (Leading::None | Leading::Matrices, _) => Some(Vec::new()),
        };
        for dim in form.dims {
            let known = match dim.name() {
                None => Some(0),
                Some(name) => self.lookup(name)?,
            };
            let size = known.and_then(|known| dim.evaluate(known));
            shape = shape.zip(size).map(|(shape, size)| [&shape[..], &[size]].concat());
        }
        shape.ok_or_else(|| {
            let got = format!("{form}, which they do not");
            Error::argument(self.spec.name, arg.name, "inputs that determine its shape", got)
        })
    }

    /// Requires two optional arguments to be given both or neither.
    pub fn together(&self, a: usize, b: usize) -> Result<()> {
        let (missing, given) = match (self.args.get(a), self.args.get(b)) {
            (Some(_), None) => (b, a),
            (None, Some(_)) => (a, b),
            _ => return Ok(()),
        };
        let expected = format!("a tensor, because `{}` is given", self.spec.args[given].name);
        Err(Error::argument(self.spec.name, self.spec.args[missing].name, expected, "nothing"))
    }

    /// Requires an option's value to satisfy `ok`.
    pub fn option(&self, name: &str, value: impl Display, expected: &str, ok: bool) -> Result<()> {
        if ok { Ok(()) } else { Err(Error::argument(self.spec.name, name, expected, value.to_string())) }
    }
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;
    use crate::op::{ArgSpec, AttrSpec, DerivedSize, Value, dims, shape};
    use crate::{Device, Tensor};

    const GATE: usize = 0;
    const ROTARY: usize = 1;
    static SPEC: OpSpec = OpSpec {
        name: "op",
        args: &[
            ArgSpec::input("x", shape![.., k], DTypeRule::FLOAT, ""),
            ArgSpec::input("w", shape![[..], rows, k], DTypeRule::Same(0), "").optional(),
            ArgSpec::input("table", shape![max_pos, rotary / 2], DTypeRule::F32, "").optional(),
            ArgSpec::input("scale", shape![(1 or k), 2], DTypeRule::SameOr(0, &[DType::F8E4M3]), "")
                .optional(),
            ArgSpec::input(
                "blocks",
                ShapeSpec::by_option(GATE, &[dims![rows], dims![.., ceil(k / 128)]]),
                DTypeRule::F32,
                "",
            )
            .with(3),
            ArgSpec::output("out", shape![.., n], DTypeRule::Same(0), ""),
        ],
        attrs: &[
            AttrSpec { name: "gate", kind: AttrKind::Choice(&["no", "yes"]), doc: "" },
            AttrSpec { name: "rotary", kind: AttrKind::Int(0), doc: "" },
        ],
        derived: &[
            DerivedSize { name: "n", rule: SizeRule::Divided { size: "rows", option: GATE, by: &[1, 2] } },
            DerivedSize { name: "rotary", rule: SizeRule::OptionOr { option: ROTARY, size: "k" } },
        ],
        ..OpSpec::EMPTY
    };

    /// The error of a call with these shapes, if there is one.
    fn judge(shapes: [Option<&[usize]>; 6], attrs: Attrs) -> Option<String> {
        let tensor = |shape: &[usize]| Tensor::zeros(shape, DType::F32, Device::Cpu).unwrap();
        let mut tensors = shapes.map(|shape| shape.map(tensor));
        let mut args = Args::new(&SPEC);
        for (index, tensor) in tensors.iter_mut().enumerate() {
            let Some(tensor) = tensor else { continue };
            args = match SPEC.args[index].is_output() {
                true => args.output(index, tensor.view_mut()),
                false => args.input(index, tensor.view()),
            };
        }
        Matcher::of(&args, &attrs).err().map(|error| error.to_string())
    }

    #[test]
    fn a_name_is_one_size_and_errors_say_which() {
        let attrs = Attrs::defaults(&SPEC);
        let gated = attrs.with(GATE, Value::Choice(1));
        let x: Option<&[usize]> = Some(&[2, 3, 8]);
        assert_eq!(judge([x, Some(&[6, 8]), None, None, None, Some(&[2, 3, 6])], attrs), None);
        assert_eq!(judge([x, Some(&[2, 6, 8]), None, None, None, Some(&[2, 3, 3])], gated), None);
        assert_eq!(judge([x, None, Some(&[9, 4]), None, None, None], attrs), None);
        let wrong = |shapes, attrs, expected: &str| {
            assert_eq!(judge(shapes, attrs).unwrap_or_default(), format!("op: argument {expected}"));
        };
        wrong(
            [x, Some(&[6, 9]), None, None, None, None],
            attrs,
            "`w`: expected shape [rows, k=8] or [2, rows, k=8], got [6, 9]",
        );
        wrong(
            [x, Some(&[6, 8]), None, None, None, Some(&[2, 3, 6])],
            gated,
            "`out`: expected shape [2, 3, n=3], got [2, 3, 6]",
        );
        wrong(
            [x, None, Some(&[9, 3]), None, None, None],
            attrs,
            "`table`: expected shape [max_pos, rotary / 2=4], got [9, 3]",
        );
        wrong(
            [x, None, Some(&[9, 4]), None, None, None],
            attrs.with(ROTARY, Value::Int(-2)),
            "`rotary`: expected a whole number from 0 to 9223372036854775807, got -2",
        );
        wrong([Some(&[]), None, None, None, None, None], attrs, "`x`: expected shape [..., k], got []");
    }

    #[test]
    fn alternatives_and_companions() {
        let attrs = Attrs::defaults(&SPEC).with(GATE, Value::Choice(1));
        let x: Option<&[usize]> = Some(&[3, 130]);
        for scale in [&[1, 2], &[130, 2]] {
            assert_eq!(judge([x, None, None, Some(scale), Some(&[3, 2]), None], attrs), None);
        }
        let error = judge([x, None, None, Some(&[3, 2]), Some(&[3, 2]), None], attrs).unwrap();
        assert!(error.contains("`scale`: expected shape [1 or k=130, 2], got [3, 2]"), "{error}");
        let error = judge([x, None, None, Some(&[1, 2]), Some(&[3, 1]), None], attrs).unwrap();
        assert!(error.contains("`blocks`: expected shape [3, ceil(k / 128)=2] with gate=yes"), "{error}");
        let error = judge([x, None, None, Some(&[1, 2]), None, None], attrs).unwrap();
        assert!(
            error.contains("`blocks`: expected a tensor, because `scale` is given, got nothing"),
            "{error}"
        );
    }

    #[test]
    fn dtypes_are_named() {
        let attrs = Attrs::defaults(&SPEC);
        let judge = |x: DType, w: DType, scale: DType| {
            let tensor = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, Device::Cpu).unwrap();
            let (x, w, scale) = (tensor(&[4], x), tensor(&[2, 4], w), tensor(&[1, 2], scale));
            let args = Args::new(&SPEC).input(0, x.view()).input(1, w.view()).input(3, scale.view());
            let mut sizes = Matcher::new(&args, &attrs);
            (0..4).try_for_each(|index| sizes.arg(index)).err().map_or(String::new(), |e| e.to_string())
        };
        use DType::{BF16, F8E4M3, F16, F32, I32};
        assert_eq!(judge(F16, F16, F16), "");
        assert_eq!(judge(F16, F16, F8E4M3), "");
        assert!(judge(I32, F16, F16).contains("`x`: expected dtype f32 or f16 or bf16, got i32"));
        assert!(judge(BF16, F16, F16).contains("`w`: expected dtype bf16, got f16"));
        assert!(judge(F16, F16, F32).contains("`scale`: expected dtype f16 or f8e4m3, got f32"));
    }
}
