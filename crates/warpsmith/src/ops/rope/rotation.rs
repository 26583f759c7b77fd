//! What a call says about the rotation: shared by `rope`, its gradient and the ops that rotate on the way.

use super::{LAYOUT, ROTARY_DIM, SCALE, THETA};
use crate::error::{Error, Result};
use crate::op::{Args, Attrs, Matcher};

/// Where the tables' elements are.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(in crate::ops) struct Tables {
    pub max_pos: usize,
    /// Strides of the rows and columns of `cos`, then of `sin`.
    pub strides: [[isize; 2]; 2],
}

/// A checked rotation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(in crate::ops) struct Rotation {
    pub rotary_dim: usize,
    pub interleaved: bool,
    /// By the opposite angle.
    pub backward: bool,
    pub theta: Bits,
    pub scale: Bits,
    pub tables: Option<Tables>,
}

/// A number that can be compared and hashed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(in crate::ops) struct Bits(u64);

impl Bits {
    pub fn get(self) -> f64 {
        f64::from_bits(self.0)
    }
}

/// Checks the numeric options. An op that rotates has them at the same positions as `rope`, under its own names.
pub(in crate::ops) fn check_numbers(sizes: &Matcher<'_>, args: &Args<'_>, attrs: &Attrs) -> Result<()> {
    let name = |index: usize| args.spec().attrs[index].name;
    let (theta, scale) = (attrs.float(THETA), attrs.float(SCALE));
    sizes.option(name(THETA), theta, "a finite number above zero", theta.is_finite() && theta > 0.0)?;
    sizes.option(name(SCALE), scale, "a finite number", scale.is_finite())
}

impl Rotation {
    /// Checks the options and the tables, which are the arguments `cos` and `sin`. `empty`: there is nothing to rotate.
    pub fn check(
        sizes: &mut Matcher<'_>,
        args: &Args<'_>,
        attrs: &Attrs,
        [cos, sin]: [usize; 2],
        head_dim: usize,
        empty: bool,
    ) -> Result<Rotation> {
        check_numbers(sizes, args, attrs)?;
        let asked = attrs.int(ROTARY_DIM);
        let rotary_dim = if asked == 0 { head_dim } else { asked as usize };
        let fits = asked >= 0 && rotary_dim <= head_dim && rotary_dim.is_multiple_of(2);
        let expected = format!("an even number up to head_dim={head_dim}");
        let name = args.spec().attrs[ROTARY_DIM].name;
        sizes.option(name, if asked == 0 { head_dim as i64 } else { asked }, &expected, fits)?;

        sizes.together(cos, sin)?;
        let tables = match (args.get(cos), args.get(sin)) {
            (Some(c), Some(s)) => {
                sizes.arg(cos)?;
                sizes.arg(sin)?;
                let max_pos = sizes.size("max_pos");
                if max_pos == 0 && !empty {
                    let (op, name) = (args.spec().name, args.spec().args[cos].name);
                    return Err(Error::argument(op, name, "a table of at least one row", "max_pos=0"));
                }
                let strides = [c, s].map(|t| [t.layout().strides()[0], t.layout().strides()[1]]);
                Some(Tables { max_pos, strides })
            }
            _ => None,
        };
        Ok(Rotation {
            rotary_dim,
            interleaved: attrs.choice(LAYOUT) == 1,
            backward: false,
            theta: Bits(attrs.float(THETA).to_bits()),
            scale: Bits(attrs.float(SCALE).to_bits()),
            tables,
        })
    }

    pub fn pairs(&self) -> usize {
        self.rotary_dim / 2
    }

    /// Bytes of the table rows that `num_tokens` tokens read at least.
    pub fn table_bytes(&self, num_tokens: usize) -> usize {
        self.tables.map_or(0, |t| 2 * t.max_pos.min(num_tokens) * self.pairs() * size_of::<f32>())
    }

    /// Positions are rows of the tables: all of them are checked before anything is written.
    pub fn check_positions(&self, op: &'static str, positions: impl Iterator<Item = i64>) -> Result<()> {
        let Some(Tables { max_pos, .. }) = self.tables else { return Ok(()) };
        for (token, position) in positions.enumerate() {
            if usize::try_from(position).is_err() || position as usize >= max_pos {
                let expected = format!("positions from 0 to below max_pos={max_pos}");
                return Err(Error::argument(
                    op,
                    "positions",
                    expected,
                    format!("{position} for token {token}"),
                ));
            }
        }
        Ok(())
    }
}
