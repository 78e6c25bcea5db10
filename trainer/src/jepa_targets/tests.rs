//! Tests of the file of targets: what is written comes back, and nothing else does.

use std::path::PathBuf;

use super::*;

const STEPS: u64 = 4;

fn header() -> Header {
    Header {
        teacher_step: 700,
        seed: 9,
        first_step: 20,
        steps: STEPS,
        rows: 2,
        len: 5,
        width: 3,
        data: std::array::from_fn(|i| 7 * i as u8),
        source: std::array::from_fn(|i| i as u8),
    }
}

fn mask(step: u64) -> Vec<bool> {
    // Step 22 has no masked position at all.
    (0..10).map(|n| step != 22 && (n + step).is_multiple_of(3)).collect()
}

fn latents(step: u64) -> Vec<f32> {
    (0..30).map(|i| (step * 100 + i) as f32 - 0.5).collect()
}

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("targets")
    }

    fn written(&self) -> Vec<u8> {
        let mut writer = Writer::create(&self.path(), header()).unwrap();
        for step in 20..20 + STEPS {
            writer.add(&mask(step), &latents(step)).unwrap();
        }
        writer.finish().unwrap();
        std::fs::read(self.path()).unwrap()
    }

    fn open_bytes(&self, bytes: &[u8]) -> Result<Reader> {
        std::fs::write(self.path(), bytes).unwrap();
        Reader::open(&self.path())
    }
}

fn read(reader: &mut Reader, step: u64) -> Result<Vec<f32>> {
    let mut into = vec![f32::NAN; 30];
    reader.read(step, &mask(step), &mut into).map(|()| into)
}

#[test]
fn every_step_comes_back_in_any_order() {
    let folder = Folder::new();
    folder.written();
    let mut reader = Reader::open(&folder.path()).unwrap();
    assert_eq!(*reader.header(), header());
    reader.require(9, 2, 5, 3).unwrap();
    for step in [20, 21, 23, 22, 20, 23, 23] {
        let want: Vec<f32> =
            latents(step).iter().enumerate().map(|(i, &x)| if mask(step)[i / 3] { x } else { 0.0 }).collect();
        assert_eq!(read(&mut reader, step).unwrap(), want, "step {step}");
    }
}

#[test]
fn a_cut_at_every_byte_of_the_header_names_the_field() {
    assert_eq!(FIELDS.iter().map(|(_, size)| size).sum::<usize>(), HEADER_BYTES);
    let folder = Folder::new();
    let whole = folder.written();
    let mut start = 0;
    for (name, size) in FIELDS {
        for cut in start..start + size {
            let error = folder.open_bytes(&whole[..cut]).unwrap_err();
            let TargetsError::Truncated { place, got, expected, .. } = &error else { panic!("cut at {cut}: {error}") };
            assert_eq!((place.as_str(), *got, *expected), (format!("header field `{name}`").as_str(), cut as u64, 132));
        }
        start += size;
    }
}

#[test]
fn a_cut_anywhere_behind_the_header_is_seen_at_the_start() {
    let folder = Folder::new();
    let whole = folder.written();
    for cut in HEADER_BYTES..whole.len() {
        let error = folder.open_bytes(&whole[..cut]).unwrap_err();
        assert!(matches!(error, TargetsError::Truncated { .. }), "cut at {cut}: {error}");
    }
    let longer: Vec<u8> = whole.iter().copied().chain([0]).collect();
    assert!(matches!(folder.open_bytes(&longer), Err(TargetsError::TooLong { .. })));
}

#[test]
fn a_file_that_is_cut_while_it_is_read_says_so() {
    let folder = Folder::new();
    let whole = folder.written();
    let mut reader = folder.open_bytes(&whole).unwrap();
    File::options().write(true).open(folder.path()).unwrap().set_len(whole.len() as u64 - 1).unwrap();
    assert!(matches!(read(&mut reader, 23), Err(TargetsError::Truncated { .. })));
    // The steps before the cut are still there.
    read(&mut reader, 21).unwrap();
}

#[test]
fn no_flipped_byte_goes_unseen() {
    let folder = Folder::new();
    let whole = folder.written();
    for at in 0..whole.len() {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x10;
        let outcome = folder.open_bytes(&bytes).and_then(|mut reader| {
            for step in 20..20 + STEPS {
                read(&mut reader, step)?;
            }
            Ok(())
        });
        let error = outcome.expect_err("a flipped byte was read as if it were whole");
        match at {
            0..8 => assert!(matches!(error, TargetsError::Foreign { .. }), "byte {at}: {error}"),
            8..12 => assert!(matches!(error, TargetsError::Version { .. }), "byte {at}: {error}"),
            12..HEADER_BYTES => assert!(matches!(error, TargetsError::Damaged { .. }), "byte {at}: {error}"),
            _ => {}
        }
    }
}

#[test]
fn another_run_is_refused_by_the_field_that_differs() {
    let folder = Folder::new();
    folder.written();
    let reader = Reader::open(&folder.path()).unwrap();
    for (numbers, field) in
        [([8, 2, 5, 3], "seed"), ([9, 3, 5, 3], "rows"), ([9, 2, 6, 3], "len"), ([9, 2, 5, 4], "width")]
    {
        let [seed, rows, len, width] = numbers;
        match reader.require(seed.into(), rows, len, width) {
            Err(TargetsError::Mismatch { field: named, .. }) => assert_eq!(named, field),
            other => panic!("{other:?}"),
        }
    }
    let message = reader.require(8, 2, 5, 3).unwrap_err().to_string();
    assert!(
        message.ends_with("was made for seed 9, this run has 8; make targets for this run, or change it"),
        "{message}"
    );
}

#[test]
fn steps_and_masks_that_are_not_there_are_errors() {
    let folder = Folder::new();
    folder.written();
    let mut reader = Reader::open(&folder.path()).unwrap();
    for step in [0, 19, 24, u64::MAX] {
        let mut into = vec![0.0; 30];
        let error = reader.read(step, &[false; 10], &mut into).unwrap_err();
        assert!(matches!(error, TargetsError::NoStep { .. }), "{error}");
        assert!(error.to_string().contains("which holds steps 20 to 23; make"), "{error}");
    }
    let mut moved = mask(21);
    moved.rotate_right(1);
    let mut into = vec![0.0; 30];
    assert!(matches!(reader.read(21, &moved, &mut into), Err(TargetsError::Mask { step: 21, .. })));
    assert!(matches!(reader.read(21, &moved[1..], &mut into), Err(TargetsError::Length { argument: "mask", .. })));
    assert!(matches!(reader.read(21, &mask(21), &mut into[1..]), Err(TargetsError::Length { argument: "into", .. })));
    read(&mut reader, 21).unwrap();
}

#[test]
fn an_unfinished_file_has_no_name_is_no_file_of_targets_and_does_not_stay() {
    let folder = Folder::new();
    let mut writer = Writer::create(&folder.path(), header()).unwrap();
    writer.add(&mask(20), &latents(20)).unwrap();
    assert!(matches!(writer.add(&mask(21)[1..], &latents(21)), Err(TargetsError::Length { argument: "mask", .. })));
    assert!(matches!(writer.add(&mask(21), &latents(21)[1..]), Err(TargetsError::Length { argument: "latents", .. })));
    // As a process leaves it that is killed here.
    writer.file.flush().unwrap();
    let unfinished = folder.0.path().join("targets.tmp");
    assert!(matches!(Reader::open(&unfinished), Err(TargetsError::Unfinished { .. })));
    let error = writer.finish().unwrap_err();
    assert!(matches!(error, TargetsError::StepCount { got: 1, expected: STEPS, .. }), "{error}");
    assert!(!folder.path().exists() && !unfinished.exists());
    assert!(matches!(Reader::open(&folder.path()), Err(TargetsError::Io { .. })));
}

#[test]
fn a_file_that_has_the_name_of_an_unfinished_one_is_left_alone() {
    let folder = Folder::new();
    let taken = folder.0.path().join("targets.tmp");
    std::fs::write(&taken, "somebody's").unwrap();
    let writer = Writer::create(&folder.path(), Header { steps: 0, ..header() }).unwrap();
    let other = folder.0.path().join("targets.1.tmp");
    assert!(other.exists());
    writer.finish().unwrap();
    assert!(folder.path().exists() && !other.exists());
    assert_eq!(std::fs::read(&taken).unwrap(), b"somebody's");
}

#[test]
fn a_file_of_no_steps_says_that_it_holds_none() {
    let folder = Folder::new();
    Writer::create(&folder.path(), Header { steps: 0, ..header() }).unwrap().finish().unwrap();
    let error = read(&mut Reader::open(&folder.path()).unwrap(), 20).unwrap_err().to_string();
    assert!(error.contains("step 20 is not in") && error.contains("which holds no step; make"), "{error}");
}

#[test]
fn a_step_too_many_is_refused() {
    let folder = Folder::new();
    let mut writer = Writer::create(&folder.path(), Header { steps: 1, ..header() }).unwrap();
    writer.add(&mask(20), &latents(20)).unwrap();
    assert!(matches!(writer.add(&mask(21), &latents(21)), Err(TargetsError::StepCount { got: 2, expected: 1, .. })));
    writer.finish().unwrap();
    Reader::open(&folder.path()).unwrap();
}

#[test]
fn another_kind_of_file_is_not_called_damaged() {
    let folder = Folder::new();
    for bytes in [&b"dm"[..], b"#!/bin/sh", &[7; 300]] {
        let error = folder.open_bytes(bytes).unwrap_err();
        // Two bytes may still be the beginning of a file of targets.
        let cut = bytes.len() < MAGIC.len();
        assert_eq!(matches!(error, TargetsError::Truncated { .. }), cut, "{error}");
        assert_eq!(matches!(error, TargetsError::Foreign { .. }), !cut, "{error}");
    }
    assert!(matches!(folder.open_bytes(&[]), Err(TargetsError::Truncated { .. })));
}
