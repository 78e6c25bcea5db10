//! What a person sees: a bar on a terminal, plain lines anywhere else.

use std::cell::{Cell, RefCell};
use std::io::{ErrorKind, IsTerminal, Write};
use std::sync::Mutex;
use std::time::Duration;

use anyhow::Context;

use indicatif::{ProgressBar, ProgressStyle};

use crate::train::Aux;

/// Where the lines of a run go.
pub struct Reporter {
    bar: Option<ProgressBar>,
    quiet: bool,
    /// What the lines of steps begin with, where several runs share a terminal; all other lines go to `out` alone.
    label: Option<String>,
    out: RefCell<Box<dyn Write>>,
    /// Whether somebody was told that `out` cannot be written.
    told: Cell<bool>,
}

impl Reporter {
    /// A bar of `total_steps` if both outputs are a terminal, plain lines otherwise; with `quiet` only results and warnings.
    pub fn new(total_steps: u64, quiet: bool) -> Reporter {
        let bar = if quiet { None } else { bar(total_steps) };
        Reporter { bar, ..Reporter::plain(Box::new(std::io::stdout()), quiet) }
    }

    /// The lines of one run of several: those of steps go to the terminal, under `label`, and every line to `log`.
    pub fn labelled(total_steps: u64, label: &str, log: Box<dyn Write>) -> Reporter {
        Reporter { bar: bar(total_steps), label: Some(label.to_owned()), ..Reporter::plain(log, false) }
    }

    /// Plain lines to `out`.
    pub fn plain(out: Box<dyn Write>, quiet: bool) -> Reporter {
        Reporter { bar: None, quiet, label: None, out: RefCell::new(out), told: Cell::new(false) }
    }

    /// Progress of the steps: moves the bar, or prints the line.
    pub fn step(&self, done: u64, line: &str) {
        let shown = self.label.as_ref().map_or_else(|| line.to_owned(), |label| format!("{label} | {line}"));
        match &self.bar {
            Some(bar) => {
                bar.set_position(done);
                bar.set_message(shown);
            }
            None if self.label.is_some() => say(&shown),
            None => self.note(line),
        }
        if self.label.is_some() {
            self.note(line);
        }
    }

    /// A line that `quiet` suppresses.
    pub fn note(&self, line: &str) {
        if !self.quiet {
            self.result(line);
        }
    }

    /// A line that is always printed.
    pub fn result(&self, line: &str) {
        let mut written = Ok(());
        self.above_bar(|| written = print_line(&mut *self.out.borrow_mut(), line));
        // What is trained counts for more than what is printed.
        if let (Err(error), false) = (written, self.told.replace(true)) {
            let fix = "the work goes on without its lines";
            self.above_bar(|| {
                _ = writeln!(std::io::stderr(), "warning: cannot write the lines of the run: {error}; {fix}")
            });
        }
    }

    /// A line about something that went wrong but does not end the run, to standard error.
    pub fn warn(&self, line: &str) {
        // Standard error may be closed; a warning that cannot be shown must not end the run.
        self.above_bar(|| {
            let _ = match &self.label {
                Some(label) => writeln!(std::io::stderr(), "warning: {label}: {line}"),
                None => writeln!(std::io::stderr(), "warning: {line}"),
            };
        });
        if self.label.is_some() {
            self.result(&format!("warning: {line}"));
        }
    }

    /// Removes the bar.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    fn above_bar(&self, print: impl FnOnce()) {
        match &self.bar {
            Some(bar) => bar.suspend(print),
            None => print(),
        }
    }
}

/// A bar of `total_steps`, where both outputs are a terminal.
fn bar(total_steps: u64) -> Option<ProgressBar> {
    let terminal = std::io::stdout().is_terminal() && std::io::stderr().is_terminal();
    terminal.then(|| {
        let style =
            ProgressStyle::with_template("{bar:16} {wide_msg}").expect("the template is a constant that parses");
        ProgressBar::new(total_steps).with_style(style)
    })
}

/// Why a line of a command's result could not be written, for [`all_said`].
static UNSAID: Mutex<Option<std::io::Error>> = Mutex::new(None);

/// Prints a line of a command's result to standard output. If it cannot be written, [`all_said`] says so at the end.
pub fn say(line: &str) {
    if let Err(error) = print_line(&mut std::io::stdout(), line) {
        UNSAID.lock().unwrap_or_else(std::sync::PoisonError::into_inner).get_or_insert(error);
    }
}

/// Whether every line of [`say`] was written.
///
/// # Errors
/// The first that was not.
pub fn all_said() -> anyhow::Result<()> {
    match UNSAID.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take() {
        Some(error) => Err(error).context("cannot write standard output; free some space, or write elsewhere"),
        None => Ok(()),
    }
}

/// A reader that went away (`| head`) has seen what it wanted.
fn print_line(out: &mut dyn Write, line: &str) -> std::io::Result<()> {
    match writeln!(out, "{line}").and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => written,
    }
}

/// The numbers of one progress line.
#[derive(Clone, Debug)]
pub struct StepLine {
    /// Steps done.
    pub done: u64,
    /// Steps of the run.
    pub total: u64,
    /// Mean loss of the step, nats.
    pub loss: f64,
    /// Mean cross-entropy of the last iteration, nats: the one that bits per byte are made of.
    pub readout_ce: f64,
    /// The terms of the JEPA objective, where the run has it.
    pub aux: Option<Aux>,
    /// Gradient norm before clipping.
    pub grad_norm: f64,
    /// Learning rate of the step.
    pub lr: f64,
    /// Mean time of a step since the last line.
    pub step_time: Duration,
    /// Bytes predicted a step.
    pub bytes_per_step: u64,
    /// Held-out bits per byte at the last evaluation.
    pub held_out_bpb: Option<f64>,
    /// Memory now and of the machine.
    pub memory: Option<(u64, u64)>,
}

impl StepLine {
    /// `step 1200/20000 | loss 1.341 (bpb 1.935) | grad 0.82 | lr 6.0e-4 | 2.1 ms | 1.95 MB/s | mem 1.8/140 GiB | eta 0m39s`
    pub fn render(&self) -> String {
        let seconds = self.step_time.as_secs_f64();
        let mut parts = vec![
            format!("step {}/{}", self.done, self.total),
            format!("loss {:.3} (bpb {:.3})", self.loss, self.readout_ce / std::f64::consts::LN_2),
        ];
        let term = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.3}"));
        parts.extend(self.aux.map(|Aux { jepa, koleo }| format!("jepa {} koleo {}", term(jepa), term(koleo))));
        parts.extend([
            format!("grad {:.2}", self.grad_norm),
            format!("lr {:.1e}", self.lr),
            format!("{:.1} ms", 1e3 * seconds),
            rate(self.bytes_per_step as f64 / seconds),
        ]);
        if let Some(bpb) = self.held_out_bpb {
            parts.push(format!("held-out {bpb:.3}"));
        }
        if let Some((used, all)) = self.memory {
            parts.push(format!("mem {:.1}/{:.0} GiB", gib(used), gib(all)));
        }
        parts.push(format!("eta {}", minutes((self.total - self.done) as f64 * seconds)));
        parts.join(" | ")
    }
}

/// Bytes as GiB.
pub fn gib(bytes: u64) -> f64 {
    bytes as f64 / (1u64 << 30) as f64
}

fn rate(bytes_per_second: f64) -> String {
    if bytes_per_second >= 1e6 {
        format!("{:.2} MB/s", bytes_per_second / 1e6)
    } else {
        format!("{:.2} kB/s", bytes_per_second / 1e3)
    }
}

/// `0m39s`, `2h05m`.
pub fn minutes(seconds: f64) -> String {
    let seconds = seconds.round() as u64;
    match seconds {
        0..3600 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        _ => format!("{}h{:02}m", seconds / 3600, seconds / 60 % 60),
    }
}

/// Bytes as one printable line: what is not printable ASCII or well-formed UTF-8 text is escaped.
pub fn printable(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text
            .chars()
            .map(|c| if c.is_control() || c == '\\' { c.escape_default().to_string() } else { c.to_string() })
            .collect(),
        Err(_) => bytes.escape_ascii().to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::{StepLine, minutes, printable};
    use crate::train::Aux;
    use std::time::Duration;

    #[test]
    fn the_line_is_the_documented_one() {
        let line = StepLine {
            done: 1200,
            total: 20000,
            loss: 1.341,
            readout_ce: 1.341,
            aux: None,
            grad_norm: 0.82,
            lr: 6e-4,
            step_time: Duration::from_micros(2100),
            bytes_per_step: 4096,
            held_out_bpb: None,
            memory: Some((19 << 30, 140 << 30)),
        };
        assert_eq!(
            line.render(),
            "step 1200/20000 | loss 1.341 (bpb 1.935) | grad 0.82 | lr 6.0e-4 | 2.1 ms | 1.95 MB/s | mem 19.0/140 GiB | eta 0m39s"
        );
        let aux = Some(Aux { jepa: None, koleo: None });
        let without = StepLine { aux, ..line.clone() }.render();
        assert!(without.contains("(bpb 1.935) | jepa - koleo - | grad 0.82"), "{without}");
        let aux = Some(Aux { jepa: Some(0.7512), koleo: Some(1.5) });
        let with = StepLine { aux, ..line.clone() }.render();
        assert!(with.contains("(bpb 1.935) | jepa 0.751 koleo 1.500 | grad 0.82"), "{with}");
        let slow = StepLine { held_out_bpb: Some(1.9), step_time: Duration::from_millis(300), memory: None, ..line };
        assert!(slow.render().contains("| 300.0 ms | 13.65 kB/s | held-out 1.900 | eta 1h34m"), "{}", slow.render());
        assert_eq!(minutes(3599.0), "59m59s");
    }

    #[test]
    fn samples_stay_on_one_line() {
        assert_eq!(printable(b"a\nb\\ \x1b[0m"), "a\\nb\\\\ \\u{1b}[0m");
        assert_eq!(printable("na\u{ef}ve".as_bytes()), "na\u{ef}ve");
        assert_eq!(printable(&[b'a', 0xff, b'\n']), "a\\xff\\n");
    }
}
