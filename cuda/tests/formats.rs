//! Formats of factors on Mesa's software Vulkan driver: bit for bit the numbers of the reference, in both arms, where the
//! case tables do not reach. Where no adapter answers, every test says so and why.

mod common;

use common::device;
use dormouse_cuda::{Arm, Gpu};
use dormouse_reference::{DType, FactorFormat, Tensors};
use ndarray::{Array3, s};

/// Words without a pattern.
struct Words(u64);

impl Words {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 32) as u32
    }

    fn below(&mut self, n: u32) -> u32 {
        ((u64::from(self.next()) * u64::from(n)) >> 32) as u32
    }

    /// A number with some leading bits and this many of its exponents below 2^`top`.
    fn number(&mut self, bits: u32, top: i32, exponents: u32) -> f32 {
        let digits = (1 << (bits - 1)) | self.below(1 << (bits - 1));
        let exponent = top - self.below(exponents) as i32 - bits as i32;
        let sign = if self.next() & 1 == 0 { 1.0 } else { -1.0 };
        (sign * f64::from(digits) * 2f64.powi(exponent)) as f32
    }
}

const KINDS: usize = 14;

/// A column of some kind.
fn column(kind: usize, rows: usize, words: &mut Words) -> Vec<f32> {
    let mut column: Vec<f32> = (0..rows)
        .map(|row| match kind {
            // Any finite number.
            0 => f32::from_bits(words.next() & 0xff7f_ffff),
            // One bit more than e4m3, bf16 and f16 have: half of them are ties, and some among subnormal numbers.
            1 => words.number(5, 0, 20),
            2 => words.number(9, 0, 20),
            3 => words.number(12, 0, 26),
            // Subnormal numbers of f32.
            4 => f32::from_bits(words.next() & 0x803f_ffff),
            5 => f32::from_bits(words.next() & 0x8000_0007),
            // Ordinary factors.
            6 => words.number(24, 0, 6),
            // Around the largest numbers.
            7 => words.number(24, 17, 3),
            8 => words.number(24, 128, 2),
            // Zeros of both signs.
            9 => f32::from_bits(words.next() & 0x8000_0000),
            // 0.7 of the mean is the first of three, exactly.
            10 if row + row % 3 + 3 > rows + 2 * (row % 3) => 10.0,
            10 => [-7.0, 10.0, 13.0][row % 3],
            // Magnitudes that lie close to the threshold: 0.7 of a mean of nearly 1.
            11 if row % 2 == 0 => 0.7 + words.number(24, -21, 3),
            11 => 1.3 + words.number(24, -21, 3),
            // Not finite.
            12 if row == rows / 2 => f32::INFINITY,
            13 if row == rows - 1 => f32::from_bits(0xffc0_1234),
            _ => words.number(24, 3, 40),
        })
        .collect();
    // The scale of fp8 changes between 1.75 times a power of two and the next number.
    if kind == 1 {
        column[rows - 1] = 448.0;
    }
    if kind == 2 {
        column[0] = f32::from_bits(448f32.to_bits() + 1);
    }
    column
}

fn same(got: f64, want: f32) -> bool {
    let got = got as f32;
    got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan())
}

/// Compares one factor `[experts, rows, rank]` in every format and both arms; the error is the first difference.
fn check(b: &Gpu, [experts, rows, rank]: [usize; 3], words: &mut Words) -> Result<(), String> {
    let mut factor = Array3::<f32>::zeros((experts, rows, rank));
    for (i, mut lane) in factor.lanes_mut(ndarray::Axis(1)).into_iter().enumerate() {
        lane.iter_mut().zip(column(i % KINDS, rows, words)).for_each(|(to, from)| *to = from);
    }
    // Not at the start of its buffer.
    let buffer = b.persistent(&[factor.len() + 3], DType::F32).unwrap();
    let tensor = b.view(&buffer, 3, factor.shape()).unwrap();
    b.upload(factor.mapv(f64::from).into_dyn().view(), &tensor).unwrap();
    for format in FactorFormat::ALL {
        for arm in Arm::ALL {
            let got = b.download(&b.rounded_factor(arm, format, &tensor).unwrap()).unwrap();
            let got = got.into_dimensionality::<ndarray::Ix3>().unwrap();
            for (e, r) in (0..experts).flat_map(|e| (0..rank).map(move |r| (e, r))) {
                let master = factor.slice(s![e, .., r]);
                let mut want: Vec<f64> = master.iter().map(|&w| f64::from(w)).collect();
                format.round_column(&mut want);
                for (row, (&got, &want)) in got.slice(s![e, .., r]).iter().zip(&want).enumerate() {
                    if !same(got, want as f32) {
                        let (kind, w) = ((e * rank + r) % KINDS, master[row]);
                        let place = format!("{format}, arm {arm}, kind {kind}, row {row} of {rows}");
                        return Err(format!("{place}: {w:e} becomes {got:e}, expected {want:e}"));
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn a_rounded_factor_has_the_bits_of_the_reference() {
    let Some(b) = device() else { return };
    let words = &mut Words(1);
    // One row; fewer rows than lanes; more of both than a cube has; a rank below a cube's columns.
    for shape in [[1, 1, KINDS], [2, 3, 21], [1, 63, KINDS], [2, 133, 28], [14, 9, 1]] {
        for _ in 0..3 {
            check(&b, shape, words).unwrap();
        }
    }
    check(&b, [1, 2048, KINDS], words).unwrap();
}

#[test]
fn the_comparison_notices_every_fault() {
    let faults = [
        ("ties-away-from-zero", "bf16"),
        ("fp8-scale-doubled", "fp8"),
        ("ternary-mean-misses-last-row", "ternary"),
        ("ternary-share-dropped", "ternary"),
    ];
    for (fault, format) in faults {
        let Some(b) = device() else { return };
        b.plant("spectral", fault).unwrap();
        let difference = check(&b, [1, 63, KINDS], &mut Words(1)).expect_err(fault);
        assert!(difference.starts_with(&format!("{format}, arm fused")), "{fault}: {difference}");
    }
    let Some(b) = device() else { return };
    b.plant("spectral", "null-renamed-element").unwrap();
    check(&b, [1, 63, KINDS], &mut Words(1)).unwrap();
}

#[test]
fn what_is_no_factor_is_refused() {
    let Some(b) = device() else { return };
    let refused = |shape: &[usize], dtype| {
        let tensor = b.persistent(shape, dtype).unwrap();
        b.rounded_factor(Arm::Fused, FactorFormat::Fp8, &tensor).unwrap_err().to_string()
    };
    let axes = refused(&[6], DType::F32);
    assert!(axes.contains("`factor`") && axes.contains("[rows, R] or [E, rows, R]"), "{axes}");
    assert!(refused(&[2, 3], DType::U32).contains("`factor`"));
}
