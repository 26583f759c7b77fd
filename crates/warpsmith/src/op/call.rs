//! The builder behind every op's Rust API: `RmsNorm::new(&x).weight(&w).run()?`.

use super::plan::Asked;
use super::{AnyOp, Args, Attrs, Choice, Explanation, Op, Plan, Select, Value};
use crate::device::Stream;
use crate::error::Result;
use crate::tensor::{DType, Tensor, TensorView, TensorViewMut};
use std::borrow::Cow;
use std::marker::PhantomData;

/// A call of the op `O` under construction. Each op adds its own methods.
pub struct Call<'a, O> {
    args: Args<'a>,
    attrs: Attrs,
    select: Select,
    kept: Option<&'a mut Option<Plan>>,
    op: PhantomData<O>,
}

impl<'a, O: Op + Default> Call<'a, O> {
    /// A call without tensors, with every option at its default. Positions, here and below, are those in the op's
    /// description; the builders of ops are made of these methods.
    pub fn start() -> Self {
        let spec = const { &O::SPEC };
        Call {
            args: Args::new(spec),
            attrs: Attrs::defaults(spec),
            select: Select::default(),
            kept: None,
            op: PhantomData,
        }
    }

    /// Sets an input.
    ///
    /// # Panics
    /// If the op's argument `index` is an output: a mistake in the op, not in the call.
    pub fn input(mut self, index: usize, view: impl Into<TensorView<'a>>) -> Self {
        self.args = self.args.input(index, view.into());
        self
    }

    /// Sets an output.
    ///
    /// # Panics
    /// If the op's argument `index` is an input: a mistake in the op, not in the call.
    pub fn output(mut self, index: usize, view: impl Into<TensorViewMut<'a>>) -> Self {
        self.args = self.args.output(index, view.into());
        self
    }

    pub(crate) fn prepared<T: std::any::Any + Sync>(mut self, index: usize, prepared: &'a T) -> Self {
        self.args = self.args.with_prepared(index, prepared);
        self
    }

    /// The value passed to [`Call::prepared`], if it has this type.
    pub(crate) fn was_prepared<T: std::any::Any>(&self) -> Option<&'a T> {
        self.args.prepared()
    }

    fn option(mut self, index: usize, value: Value) -> Self {
        self.attrs = self.attrs.with(index, value);
        self
    }

    /// Sets an option that is a real number.
    pub fn float(self, index: usize, value: impl Into<f64>) -> Self {
        self.option(index, Value::Float(value.into()))
    }

    /// Sets an option that is a whole number, saturating to `i64`.
    pub fn int(self, index: usize, value: impl TryInto<i64>) -> Self {
        self.option(index, Value::Int(value.try_into().unwrap_or(i64::MAX)))
    }

    /// Sets an option that is a switch.
    pub fn flag(self, index: usize, value: bool) -> Self {
        self.option(index, Value::Bool(value))
    }

    /// Sets an option that is one of several names. A position beyond them is refused when the call is checked.
    pub fn choice(self, index: usize, value: impl Choice) -> Self {
        self.option(index, Value::Choice(value.position()))
    }

    /// Uses the kernel of this name or fails.
    pub fn kernel(mut self, name: impl Into<Cow<'static, str>>) -> Self {
        self.select.kernel = Some(name.into());
        self
    }

    /// Allows kernels whose results for one row depend on the rest of the batch.
    pub fn allow_batch_variant(mut self) -> Self {
        self.select.allow_batch_variant = true;
        self
    }

    /// Keeps the call's plan in `plan` and reuses it while it fits the call: a layer that owns one saves the look-up.
    ///
    /// ```
    /// use warpsmith::{DType, Device, Result, Tensor, op::Plan, ops::RmsNorm};
    /// struct Norm {
    ///     weight: Tensor,
    ///     plan: Option<Plan>,
    /// }
    /// impl Norm {
    ///     fn forward(&mut self, x: &Tensor) -> Result<Tensor> {
    ///         RmsNorm::new(x).weight(&self.weight).keep_plan(&mut self.plan).run()
    ///     }
    /// }
    /// let mut norm = Norm { weight: Tensor::randn(&[64], DType::F32, Device::Cpu, 0)?, plan: None };
    /// norm.forward(&Tensor::randn(&[4, 64], DType::F32, Device::Cpu, 1)?)?;
    /// assert!(norm.plan.is_some());
    /// # Ok::<(), warpsmith::Error>(())
    /// ```
    pub fn keep_plan(mut self, plan: &'a mut Option<Plan>) -> Self {
        self.kept = Some(plan);
        self
    }

    /// The device's default stream: the one calls without a stream use.
    pub fn default_stream(&self) -> Result<Stream> {
        self.args.device().default_stream()
    }

    /// An argument already given.
    pub(crate) fn view(&self, index: usize) -> &TensorView<'_> {
        self.args.at(index)
    }

    /// A new tensor with the shape and dtype of an argument already given.
    pub(crate) fn like(&self, index: usize, stream: &Stream) -> Result<Tensor> {
        self.like_as(index, self.args.at(index).dtype(), stream)
    }

    /// As [`Self::like`]; zeroed if `starts`, where requests begin, are given, because rows of no request are not
    /// written.
    pub(crate) fn like_packed(&self, index: usize, starts: usize, stream: &Stream) -> Result<Tensor> {
        let tensor = self.like(index, stream)?;
        self.cleared_if(starts, tensor, stream)
    }

    /// Fills a new tensor with zeros if an argument is given.
    pub(crate) fn cleared_if(&self, index: usize, mut tensor: Tensor, stream: &Stream) -> Result<Tensor> {
        if self.args.get(index).is_some() {
            tensor.clear_on(stream)?;
        }
        Ok(tensor)
    }

    /// A new tensor with the shape of an argument already given.
    pub(crate) fn like_as(&self, index: usize, dtype: DType, stream: &Stream) -> Result<Tensor> {
        Tensor::empty_on(self.args.at(index).shape(), dtype, stream)
    }

    /// A new tensor for the output `index`, with the shape and dtype that the other arguments and the
    /// options ask for.
    pub fn allocate(&self, index: usize, stream: &Stream) -> Result<Tensor> {
        let mut forms = O::default().outputs(&self.args, &self.attrs, &[index])?;
        let (shape, dtype) = forms.swap_remove(index).expect("an output that was asked for");
        Tensor::empty_on(&shape, dtype, stream)
    }

    /// Runs on the device's default stream, and returns new tensors for the outputs at these positions.
    pub fn run_for<const N: usize>(self, outputs: [usize; N]) -> Result<[Tensor; N]> {
        let stream = self.default_stream()?;
        let made = outputs.iter().map(|&index| self.allocate(index, &stream));
        let mut made = made.collect::<Result<Vec<Tensor>>>()?;
        let mut args = self.args;
        for (&index, tensor) in outputs.iter().zip(&mut made) {
            args = args.output(index, tensor.view_mut());
        }
        launch::<O>(&args, &self.attrs, &self.select, self.kept, &stream)?;
        Ok(made.try_into().expect("a tensor for each output"))
    }

    /// Launches with the outputs given by position.
    pub fn launch<'b, const N: usize>(
        self,
        outputs: [(usize, TensorViewMut<'b>); N],
        stream: &Stream,
    ) -> Result<()>
    where
        'a: 'b,
    {
        let mut args: Args<'b> = self.args;
        for (index, view) in outputs {
            args = args.output(index, view);
        }
        launch::<O>(&args, &self.attrs, &self.select, self.kept, stream)
    }

    /// As [`Call::launch`], with `output` written over `input`.
    pub fn launch_in_place<'b>(
        self,
        input: usize,
        output: usize,
        view: TensorViewMut<'b>,
        stream: &Stream,
    ) -> Result<()>
    where
        'a: 'b,
    {
        self.launch_in_place_with((input, output, view), [], stream)
    }

    /// As [`Call::launch_in_place`], with other outputs given by position.
    pub fn launch_in_place_with<'b, const N: usize>(
        self,
        (input, output, view): (usize, usize, TensorViewMut<'b>),
        others: [(usize, TensorViewMut<'b>); N],
        stream: &Stream,
    ) -> Result<()>
    where
        'a: 'b,
    {
        let mut args: Args<'b> = self.args;
        args.set_in_place(input, output, view);
        for (index, view) in others {
            args.set_output(index, view);
        }
        launch::<O>(&args, &self.attrs, &self.select, self.kept, stream)
    }
}

/// Launches the plan that was kept, or finds one and keeps it.
fn launch<O: Op>(
    args: &Args<'_>,
    attrs: &Attrs,
    select: &Select,
    kept: Option<&mut Option<Plan>>,
    stream: &Stream,
) -> Result<()> {
    launch_asked(&Asked::of::<O>(args, attrs, select), kept, stream)
}

fn launch_asked(asked: &Asked<'_>, kept: Option<&mut Option<Plan>>, stream: &Stream) -> Result<()> {
    let args = asked.args;
    if let Some(plan) = kept.as_deref().and_then(Option::as_ref)
        && plan.is_of(asked)
    {
        return plan.launch(args, stream);
    }
    let plan = Plan::find(asked, Some(stream))?;
    plan.launch(args, stream)?;
    if let Some(kept) = kept {
        *kept = Some(plan);
    }
    Ok(())
}

/// An op with one output, which its calls can allocate.
pub trait OneOutput: Op + Default {
    /// The position of the output.
    const OUTPUT: usize;
}

impl<'a, O: OneOutput> Call<'a, O> {
    /// Runs on the device's default stream and returns a new tensor.
    pub fn run(self) -> Result<Tensor> {
        let stream = self.default_stream()?;
        let mut out = self.allocate(O::OUTPUT, &stream)?;
        self.run_into(&mut out, &stream)?;
        Ok(out)
    }

    /// Which kernel [`run`](Call::run) would take, in which configuration and precision, and why it takes no other.
    pub fn explain(self) -> Result<Explanation> {
        let mut out = self.allocate(O::OUTPUT, &self.default_stream()?)?;
        let args = self.args.output(O::OUTPUT, out.view_mut());
        O::default().explain(&args, &self.attrs, &args.device().info()?, &self.select)
    }

    /// Runs on `stream` into the caller's memory.
    pub fn run_into<'b>(self, out: impl Into<TensorViewMut<'b>>, stream: &Stream) -> Result<()>
    where
        'a: 'b,
    {
        self.launch([(O::OUTPUT, out.into())], stream)
    }
}
