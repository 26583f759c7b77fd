//! From a template's source to instructions that cannot take more than they may.
//!
//! The instructions of minijinja have no limit on what operators make: `x ~ x`, `x * n`, `[x, x]`, a captured block. So
//! checks are put around them after compiling. The compiler folds constants and recurses, so what it is given is checked too.

use super::{MAX_ELIFS, MAX_FOLDED, MAX_NESTING, MAX_SOURCE, MAX_TAG, meter, weigh};
use minijinja::machinery::ast::{BinOpKind, Call, CallArg, Expr, Macro, Stmt};
use minijinja::machinery::{
    CodeGenerator, Instruction, Instructions, Token, WhitespaceConfig, parse, tokenize,
};
use minijinja::syntax::SyntaxConfig;
use minijinja::{Error, Value};
use std::collections::BTreeMap;

/// Checks the operands of an instruction, which it gets as a list, and gives them back in the opposite order.
pub const FIT: &str = "fit:operands";
/// Counts a value that was just made.
pub const MADE: &str = "fit:made";
/// Looks at the clock.
pub const TICK: &str = "fit:tick";

/// A template, ready to be run.
pub struct Program<'s> {
    pub main: Instructions<'s>,
    pub blocks: BTreeMap<&'s str, Instructions<'s>>,
}

/// As transformers sets them.
const WHITESPACE: WhitespaceConfig =
    WhitespaceConfig { keep_trailing_newline: false, lstrip_blocks: true, trim_blocks: true };

/// Compiles a template.
pub fn compile(source: &str) -> Result<Program<'_>, Error> {
    check_tokens(source)?;
    let template = parse(source, "chat", SyntaxConfig, WHITESPACE)?;
    check_statement(&template)?;
    let mut generator = CodeGenerator::new("chat", source);
    generator.compile_stmt(&template);
    let (main, blocks) = generator.finish();
    let blocks = blocks.iter().map(|(name, block)| Ok((*name, guarded(block)?)));
    Ok(Program { main: guarded(&main)?, blocks: blocks.collect::<Result<_, Error>>()? })
}

/// Before parsing: the parser recurses into chains of operators and of `elif`.
fn check_tokens(source: &str) -> Result<(), Error> {
    if source.len() > MAX_SOURCE {
        return Err(meter::exceed("length in bytes", MAX_SOURCE as u64));
    }
    let (mut in_tag, mut elifs) = (0, 0);
    for token in tokenize(source, false, SyntaxConfig, WHITESPACE) {
        match token?.0 {
            Token::BlockStart | Token::VariableStart => in_tag = 0,
            Token::Ident("elif") => elifs += 1,
            _ => in_tag += 1,
        }
        if in_tag > MAX_TAG {
            return Err(meter::exceed("number of tokens in a tag", MAX_TAG as u64));
        }
        if elifs > MAX_ELIFS {
            return Err(meter::exceed("number of `elif`s", MAX_ELIFS as u64));
        }
    }
    Ok(())
}

fn check_statements(statements: &[Stmt<'_>]) -> Result<(), Error> {
    statements.iter().try_for_each(check_statement)
}

fn check_statement(statement: &Stmt<'_>) -> Result<(), Error> {
    let exprs = |exprs: &[&Expr<'_>]| exprs.iter().try_for_each(|expr| check(expr, 0));
    match statement {
        Stmt::Template(inner) => check_statements(&inner.children),
        Stmt::EmitExpr(inner) => check(&inner.expr, 0),
        Stmt::ForLoop(inner) => {
            exprs(&[&inner.target, &inner.iter])?;
            inner.filter_expr.iter().try_for_each(|expr| check(expr, 0))?;
            check_statements(&inner.body)?;
            check_statements(&inner.else_body)
        }
        Stmt::IfCond(inner) => {
            check(&inner.expr, 0)?;
            check_statements(&inner.true_body)?;
            check_statements(&inner.false_body)
        }
        Stmt::WithBlock(inner) => {
            inner.assignments.iter().try_for_each(|(to, from)| exprs(&[to, from]))?;
            check_statements(&inner.body)
        }
        Stmt::Set(inner) => exprs(&[&inner.target, &inner.expr]),
        Stmt::SetBlock(inner) => {
            check(&inner.target, 0)?;
            inner.filter.iter().try_for_each(|expr| check(expr, 0))?;
            check_statements(&inner.body)
        }
        Stmt::AutoEscape(inner) => {
            check(&inner.enabled, 0)?;
            check_statements(&inner.body)
        }
        Stmt::FilterBlock(inner) => {
            check(&inner.filter, 0)?;
            check_statements(&inner.body)
        }
        Stmt::Block(inner) => check_statements(&inner.body),
        Stmt::Import(inner) => exprs(&[&inner.expr, &inner.name]),
        Stmt::FromImport(inner) => check(&inner.expr, 0),
        Stmt::Extends(inner) => check(&inner.name, 0),
        Stmt::Include(inner) => check(&inner.name, 0),
        Stmt::Macro(inner) => check_macro(inner),
        Stmt::CallBlock(inner) => {
            check_call(&inner.call, 0)?;
            check_macro(&inner.macro_decl)
        }
        Stmt::Do(inner) => check_call(&inner.call, 0),
        Stmt::EmitRaw(_) | Stmt::Continue(_) | Stmt::Break(_) => Ok(()),
    }
}

fn check_macro(inner: &Macro<'_>) -> Result<(), Error> {
    inner.args.iter().chain(&inner.defaults).try_for_each(|expr| check(expr, 0))?;
    check_statements(&inner.body)
}

fn check_call(call: &Call<'_>, depth: usize) -> Result<(), Error> {
    check(&call.expr, depth)?;
    check_args(&call.args, depth)
}

fn check_args(args: &[CallArg<'_>], depth: usize) -> Result<(), Error> {
    args.iter().try_for_each(|arg| match arg {
        CallArg::Pos(expr)
        | CallArg::Kwarg(_, expr)
        | CallArg::PosSplat(expr)
        | CallArg::KwargSplat(expr) => check(expr, depth),
    })
}

/// Depth of an expression, and constants that the compiler would compute: those inside are checked first.
fn check(expr: &Expr<'_>, depth: usize) -> Result<(), Error> {
    if depth > MAX_NESTING {
        return Err(meter::exceed("nesting of expressions", MAX_NESTING as u64));
    }
    let depth = depth + 1;
    let all = |exprs: &[&Expr<'_>]| exprs.iter().try_for_each(|expr| check(expr, depth));
    match expr {
        Expr::Var(_) | Expr::Const(_) => Ok(()),
        Expr::Slice(inner) => {
            check(&inner.expr, depth)?;
            let bounds = [&inner.start, &inner.stop, &inner.step];
            bounds.into_iter().flatten().try_for_each(|expr| check(expr, depth))
        }
        Expr::UnaryOp(inner) => check(&inner.expr, depth),
        Expr::BinOp(inner) => {
            all(&[&inner.left, &inner.right])?;
            let sign = match inner.op {
                BinOpKind::Add => "+",
                BinOpKind::Concat => "~",
                BinOpKind::Mul => "*",
                _ => return Ok(()),
            };
            let (Some(left), Some(right)) = (inner.left.as_const(), inner.right.as_const()) else {
                return Ok(());
            };
            if bytes_of(sign, &left, &right)? > MAX_FOLDED {
                return Err(meter::exceed("constants in bytes", MAX_FOLDED as u64));
            }
            meter::charge(0)
        }
        Expr::Compare(inner) => {
            check(&inner.expr, depth)?;
            inner.ops.iter().try_for_each(|op| check(&op.expr, depth))
        }
        Expr::IfExpr(inner) => {
            all(&[&inner.test_expr, &inner.true_expr])?;
            inner.false_expr.iter().try_for_each(|expr| check(expr, depth))
        }
        Expr::Filter(inner) => {
            inner.expr.iter().try_for_each(|expr| check(expr, depth))?;
            check_args(&inner.args, depth)
        }
        Expr::Test(inner) => {
            check(&inner.expr, depth)?;
            check_args(&inner.args, depth)
        }
        Expr::GetAttr(inner) => check(&inner.expr, depth),
        Expr::GetItem(inner) => all(&[&inner.expr, &inner.subscript_expr]),
        Expr::Call(inner) => check_call(inner, depth),
        Expr::List(inner) => inner.items.iter().try_for_each(|expr| check(expr, depth)),
        Expr::Map(inner) => inner.keys.iter().chain(&inner.values).try_for_each(|expr| check(expr, depth)),
    }
}

/// The most bytes that an operator makes of its operands.
pub fn bytes_of(sign: &str, left: &Value, right: &Value) -> Result<usize, Error> {
    let repeated = |what: &Value, times: &Value| -> Result<usize, Error> {
        let is_repeated = what.as_str().is_some() || what.as_object().is_some();
        match times.as_usize().filter(|_| is_repeated) {
            Some(times) => Ok(weigh::size(what)?.bytes.saturating_mul(times)),
            None => Ok(0),
        }
    };
    match sign {
        "~" => Ok(weigh::text_bound(left)?.saturating_add(weigh::text_bound(right)?)),
        "*" => Ok(repeated(left, right)?.max(repeated(right, left)?)),
        _ => Ok(weigh::size(left)?.bytes.saturating_add(weigh::size(right)?.bytes)),
    }
}

/// The same instructions, with checks.
fn guarded<'s>(old: &Instructions<'s>) -> Result<Instructions<'s>, Error> {
    let mut new = Instructions::new(old.name(), old.source());
    let mut places = Vec::with_capacity(old.len() + 1);
    for (i, instruction) in (0..).map_while(|i| Some((i, old.get(i)?))) {
        places.push(new.len() as u32);
        let line = old.get_line(i).unwrap_or(0) as u16;
        for instruction in with_checks(instruction)? {
            new.add_with_line(instruction, line);
        }
    }
    places.push(new.len() as u32);
    for i in 0..new.len() as u32 {
        if let Some(
            Instruction::Iterate(to)
            | Instruction::Jump(to)
            | Instruction::JumpIfFalse(to)
            | Instruction::JumpIfFalseOrPop(to)
            | Instruction::JumpIfTrueOrPop(to)
            | Instruction::BuildMacro(_, to, _),
        ) = new.get_mut(i)
        {
            *to = places[*to as usize];
        }
    }
    Ok(new)
}

/// Not one of the places where the machine keeps filters it has found.
const NOT_KEPT: u8 = !0;

/// An instruction and the checks around it.
fn with_checks<'s>(instruction: &Instruction<'s>) -> Result<Vec<Instruction<'s>>, Error> {
    let operands = |count: usize, sign: &str| {
        [
            Instruction::BuildList(Some(count)),
            Instruction::LoadConst(Value::from(sign)),
            Instruction::ApplyFilter(FIT, Some(2), NOT_KEPT),
            Instruction::UnpackList(count),
        ]
    };
    let made = Instruction::ApplyFilter(MADE, Some(1), NOT_KEPT);
    let tick = Instruction::ApplyFilter(TICK, Some(1), NOT_KEPT);
    let operator = |sign| operands(2, sign).into_iter().chain([instruction.clone(), made.clone()]).collect();
    Ok(match instruction {
        Instruction::Add => operator("+"),
        Instruction::Mul => operator("*"),
        Instruction::StringConcat => operator("~"),
        Instruction::Slice => operands(4, "[:]").into_iter().chain([instruction.clone(), made]).collect(),
        Instruction::SetAttr(name) => {
            operands(2, &format!("={name}")).into_iter().chain([instruction.clone()]).collect()
        }
        Instruction::UnpackLists(count) | Instruction::MergeKwargs(count) => {
            operands(*count, "*args").into_iter().chain([instruction.clone()]).collect()
        }
        Instruction::BuildList(_) | Instruction::BuildMap(_) | Instruction::EndCapture => {
            vec![instruction.clone(), made]
        }
        // Through the formatter, which counts.
        Instruction::EmitRaw(text) => {
            vec![Instruction::LoadConst(Value::from(*text)), Instruction::Emit]
        }
        Instruction::LoadConst(value) => vec![Instruction::LoadConst(weigh::made(value.clone())?)],
        Instruction::Eq
        | Instruction::Ne
        | Instruction::Gt
        | Instruction::Gte
        | Instruction::Lt
        | Instruction::Lte
        | Instruction::In
        | Instruction::CompareAndPreserve(_)
        | Instruction::GetItem
        | Instruction::CallMethod(..)
        | Instruction::CallObject(_)
        | Instruction::PushLoop(_)
        // Each round of a loop has one.
        | Instruction::StoreLocal(_) => vec![tick, instruction.clone()],
        other => vec![other.clone()],
    })
}
