//! The builder behind every op's Rust API: `RmsNorm::new(&x).weight(&w).run()?`.

use crate::device::Stream;
use crate::error::Result;
use crate::op::AnyOp;
use crate::op::{Args, Attrs, Choice, Explanation, Op, Select, Value};
use crate::tensor::{DType, Tensor, TensorView, TensorViewMut};
use std::marker::PhantomData;

/// A call of the op `O` under construction. Each op adds its own methods.
pub struct Call<'a, O> {
    args: Args<'a>,
    attrs: Attrs,
    select: Select,
    op: PhantomData<O>,
}

impl<'a, O: Op + Default> Call<'a, O> {
    pub(crate) fn start() -> Self {
        let spec = const { &O::SPEC };
        Call {
            args: Args::new(spec),
            attrs: Attrs::defaults(spec),
            select: Select::default(),
            op: PhantomData,
        }
    }

    pub(crate) fn input(mut self, index: usize, view: impl Into<TensorView<'a>>) -> Self {
        self.args = self.args.input(index, view.into());
        self
    }

    pub(crate) fn output(mut self, index: usize, view: impl Into<TensorViewMut<'a>>) -> Self {
        self.args = self.args.output(index, view.into());
        self
    }

    pub(crate) fn prepared<T: std::any::Any + Sync>(mut self, prepared: &'a T) -> Self {
        self.args = self.args.with_prepared(prepared);
        self
    }

    /// What [`Call::prepared`] was given, if it is of this type.
    pub(crate) fn was_prepared<T: std::any::Any>(&self) -> Option<&'a T> {
        self.args.prepared()
    }

    fn option(mut self, index: usize, value: Value) -> Self {
        self.attrs = self.attrs.with(index, value);
        self
    }

    /// Sets an option that is a real number.
    pub(crate) fn float(self, index: usize, value: impl Into<f64>) -> Self {
        self.option(index, Value::Float(value.into()))
    }

    /// Sets an option that is a whole number. What does not fit `i64` is as large as that can be.
    pub(crate) fn int(self, index: usize, value: impl TryInto<i64>) -> Self {
        self.option(index, Value::Int(value.try_into().unwrap_or(i64::MAX)))
    }

    /// Sets an option that is a switch.
    pub(crate) fn flag(self, index: usize, value: bool) -> Self {
        self.option(index, Value::Bool(value))
    }

    /// Sets an option that is one of several names. A position beyond them is refused when the call is checked.
    pub(crate) fn choice(self, index: usize, value: impl Choice) -> Self {
        self.option(index, Value::Choice(value.position()))
    }

    /// Uses the kernel of this name or fails.
    pub fn kernel(mut self, name: impl Into<String>) -> Self {
        self.select.kernel = Some(name.into());
        self
    }

    /// Allows kernels whose results for one row depend on the rest of the batch.
    pub fn allow_batch_variant(mut self) -> Self {
        self.select.allow_batch_variant = true;
        self
    }

    /// The device's default stream: the one calls without a stream use.
    pub(crate) fn default_stream(&self) -> Result<Stream> {
        self.args.device().default_stream()
    }

    /// An argument already given.
    pub(crate) fn view(&self, index: usize) -> &TensorView<'a> {
        self.args.at(index)
    }

    /// A new tensor with the shape and dtype of an argument already given.
    pub(crate) fn like(&self, index: usize, stream: &Stream) -> Result<Tensor> {
        self.like_as(index, self.args.at(index).dtype(), stream)
    }

    /// As [`Self::like`]; of zeros if `starts`, which say where requests begin, are given: rows of none are not written.
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
    pub(crate) fn allocate(&self, index: usize, stream: &Stream) -> Result<Tensor> {
        let mut forms = O::default().outputs(&self.args, &self.attrs, &[index])?;
        let (shape, dtype) = forms.swap_remove(index).expect("an output that was asked for");
        Tensor::empty_on(&shape, dtype, stream)
    }

    /// Checks, selects and launches with the outputs given by position.
    pub(crate) fn launch<'b, const N: usize>(
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
        O::default().run(&args, &self.attrs, stream, &self.select).map(|_| ())
    }

    /// As [`Call::launch`], with `output` written over `input`.
    pub(crate) fn launch_in_place<'b>(
        self,
        input: usize,
        output: usize,
        view: TensorViewMut<'b>,
        stream: &Stream,
    ) -> Result<()>
    where
        'a: 'b,
    {
        let args: Args<'b> = self.args;
        O::default().run(&args.in_place(input, output, view), &self.attrs, stream, &self.select).map(|_| ())
    }
}

impl<O> Clone for Call<'_, O> {
    fn clone(&self) -> Self {
        Call { args: self.args.clone(), attrs: self.attrs, select: self.select.clone(), op: PhantomData }
    }
}

/// An op whose calls can make its one output themselves.
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
    pub fn explain(&self) -> Result<Explanation> {
        let mut out = self.allocate(O::OUTPUT, &self.default_stream()?)?;
        let args = self.args.clone().output(O::OUTPUT, out.view_mut());
        O::default().explain(&args, &self.attrs, &args.device().info()?, &self.select)
    }

    /// Runs on `stream` into memory of the caller's.
    pub fn run_into<'b>(self, out: impl Into<TensorViewMut<'b>>, stream: &Stream) -> Result<()>
    where
        'a: 'b,
    {
        self.launch([(O::OUTPUT, out.into())], stream)
    }
}
