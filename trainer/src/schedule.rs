//! The learning rate as a pure function of the step.

/// Shape of the learning rate over a run: linear warm-up, constant, 1 - sqrt decay.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// Learning rate of the constant part.
    pub lr: f64,
    /// Share of the run spent warming up, in percent.
    pub warmup_percent: f64,
    /// Warm-up steps at least, whatever the share gives.
    pub warmup_min_steps: u64,
    /// Share of the run, at its end, spent decaying, in percent.
    pub decay_percent: f64,
}

impl Schedule {
    /// Steps of decay in a run of `total_steps`.
    pub fn decay_steps(&self, total_steps: u64) -> u64 {
        ((total_steps as f64 * self.decay_percent / 100.0).round() as u64).min(total_steps)
    }

    /// Steps of warm-up in a run of `total_steps`; never so many that they reach into the decay.
    pub fn warmup_steps(&self, total_steps: u64) -> u64 {
        let share = (total_steps as f64 * self.warmup_percent / 100.0).round() as u64;
        share.max(self.warmup_min_steps).min(total_steps - self.decay_steps(total_steps))
    }

    /// The learning rate of step `step` (counted from 0) in a run of `total_steps`.
    ///
    /// Warm-up of `w` steps: `lr (step+1)/w`, so the first step moves and step `w-1` has the full rate.
    /// Decay over the last `d` steps: `lr (1 - sqrt(i/(d+1)))` for the i-th of them, i = 1..d, so the last step still moves.
    /// A step past the end keeps the last step's rate.
    pub fn lr_at(&self, step: u64, total_steps: u64) -> f64 {
        if total_steps == 0 {
            return self.lr;
        }
        let step = step.min(total_steps - 1);
        let warmup = self.warmup_steps(total_steps);
        let decay = self.decay_steps(total_steps);
        let decay_start = total_steps - decay;
        if step < warmup {
            self.lr * (step + 1) as f64 / warmup as f64
        } else if step >= decay_start {
            let i = step - decay_start + 1;
            self.lr * (1.0 - (i as f64 / (decay + 1) as f64).sqrt())
        } else {
            self.lr
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Schedule;

    const SCHEDULE: Schedule = Schedule { lr: 2e-3, warmup_percent: 2.0, warmup_min_steps: 20, decay_percent: 20.0 };

    #[test]
    fn warmup_is_two_percent_and_at_least_twenty() {
        assert_eq!(SCHEDULE.warmup_steps(900), 20);
        assert_eq!(SCHEDULE.warmup_steps(5000), 100);
        assert_eq!(SCHEDULE.lr_at(0, 900), 2e-3 / 20.0);
        assert_eq!(SCHEDULE.lr_at(9, 900), 1e-3);
        assert_eq!(SCHEDULE.lr_at(19, 900), 2e-3);
    }

    #[test]
    fn the_middle_is_constant() {
        for step in 20..720 {
            assert_eq!(SCHEDULE.lr_at(step, 900), 2e-3, "step {step}");
        }
    }

    #[test]
    fn the_decay_is_one_minus_sqrt_and_never_zero() {
        // 180 decay steps; the 45th is step 764: 1 - sqrt(45/181).
        let expected = 2e-3 * (1.0 - (45.0f64 / 181.0).sqrt());
        assert!((SCHEDULE.lr_at(764, 900) - expected).abs() < 1e-18);
        for step in 720..900 {
            assert!(SCHEDULE.lr_at(step, 900) < SCHEDULE.lr_at(step - 1, 900), "step {step}");
            assert!(SCHEDULE.lr_at(step, 900) > 0.0, "step {step}");
        }
        assert_eq!(SCHEDULE.lr_at(5000, 900), SCHEDULE.lr_at(899, 900));
    }

    #[test]
    fn short_runs_fit_both_ends() {
        for total in 1..60 {
            let (warmup, decay) = (SCHEDULE.warmup_steps(total), SCHEDULE.decay_steps(total));
            assert!(warmup + decay <= total, "{total} steps: {warmup} + {decay}");
            for step in 0..total {
                let lr = SCHEDULE.lr_at(step, total);
                assert!(lr > 0.0 && lr <= 2e-3, "{total} steps, step {step}: {lr}");
            }
        }
        assert_eq!(SCHEDULE.lr_at(0, 0), 2e-3);
    }
}
