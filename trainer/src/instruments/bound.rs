//! What a step waits for: launches, the host, or the device.
//!
//! ```text
//! issue = launches * eager price + nodes * graph price      what launching alone costs
//! busy  = device time / step time                           the share of a step in which the device works
//! ```
//!
//! A step is launch-bound if `issue` is at least half of it, else host-bound if the device idles a fifth of it or more,
//! else device-bound. Prices are measured at the start of the run.

use dormouse_cuda::Price;

/// Share of a step from which its launches are what it waits for.
const LAUNCH_SHARE: f64 = 0.5;

/// Share of busy time from which the device is what a step waits for.
const BUSY_SHARE: f64 = 0.8;

/// What a step does and takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepCost {
    /// Time of a step.
    pub step_ms: f64,
    /// Of it, time in which the device works, where it was measured.
    pub device_ms: Option<f64>,
    /// Launches a step, one by one; the launch of a graph is one.
    pub launches: f64,
    /// Nodes of replayed graphs a step.
    pub nodes: f64,
}

impl StepCost {
    /// Milliseconds that launching costs.
    pub fn issue_ms(&self, price: &Price) -> f64 {
        (self.launches * price.eager_us + self.nodes * price.graph_us.unwrap_or(price.eager_us)) / 1e3
    }

    /// Share of a step in which the device works.
    pub fn busy(&self) -> Option<f64> {
        self.device_ms.map(|device| (device / self.step_ms).min(1.0))
    }

    /// `launch-bound`, `host-bound`, `device-bound`, or `unknown` where the device was not timed.
    pub fn word(&self, price: &Price) -> &'static str {
        if self.issue_ms(price) >= LAUNCH_SHARE * self.step_ms {
            return "launch-bound";
        }
        match self.busy() {
            None => "unknown",
            Some(busy) if busy < BUSY_SHARE => "host-bound",
            Some(_) => "device-bound",
        }
    }

    /// All of it in one line.
    pub fn line(&self, price: &Price) -> String {
        format!(
            "a step: {:.3} ms, {:.0} launches and {:.0} graph nodes; a launch costs {:.2} us{}, so launching takes {:.0} %; \
             device busy {}: {}",
            self.step_ms,
            self.launches,
            self.nodes,
            price.eager_us,
            price.graph_us.map_or(String::new(), |us| format!(", a node {us:.2} us")),
            100.0 * self.issue_ms(price) / self.step_ms,
            self.busy().map_or("not measured".to_owned(), |busy| format!("{:.0} %", 100.0 * busy)),
            self.word(price)
        )
    }
}

#[cfg(test)]
mod tests {
    use dormouse_cuda::Price;

    use super::StepCost;

    const PRICE: Price = Price { eager_us: 5.0, graph_us: Some(1.0) };

    #[test]
    fn each_bound_has_its_word() {
        let eager = StepCost { step_ms: 6.0, device_ms: Some(1.0), launches: 1000.0, nodes: 0.0 };
        assert_eq!((eager.issue_ms(&PRICE), eager.word(&PRICE)), (5.0, "launch-bound"));
        let graph = StepCost { step_ms: 3.0, device_ms: Some(2.9), launches: 1.0, nodes: 1000.0 };
        assert_eq!(graph.word(&PRICE), "device-bound");
        let waiting = StepCost { device_ms: Some(1.0), ..graph };
        assert_eq!(waiting.word(&PRICE), "host-bound");
        let line = waiting.line(&PRICE);
        assert!(line.contains("1 launches and 1000 graph nodes") && line.contains("busy 33 %: host-bound"), "{line}");
        assert_eq!(StepCost { device_ms: None, ..graph }.word(&PRICE), "unknown");
    }
}
