use tpu_dist_mesh::{Channel, ChannelId, Fabric};

use super::{Network, Unroutable};

/// The links of TPU slices and of the data-center network between them. Ranks are the fabric's.
pub struct FabricNetwork<'a> {
    fabric: &'a Fabric,
    channels: Vec<Channel>,
}

impl<'a> FabricNetwork<'a> {
    /// All channels of `fabric`.
    pub fn new(fabric: &'a Fabric) -> FabricNetwork<'a> {
        let ids = (0..fabric.channels() as u32).map(ChannelId);
        FabricNetwork {
            fabric,
            channels: ids.map(|id| fabric.channel(id)).collect(),
        }
    }
}

impl Network for FabricNetwork<'_> {
    fn ranks(&self) -> u32 {
        self.fabric.ranks()
    }

    fn links(&self) -> usize {
        self.channels.len()
    }

    fn bandwidth(&self, link: usize) -> f64 {
        self.channels[link].bandwidth
    }

    fn latency(&self, link: usize) -> f64 {
        self.channels[link].latency
    }

    fn startup(&self, from: u32, to: u32) -> f64 {
        self.fabric.startup(from, to)
    }

    fn route(&self, from: u32, to: u32, links: &mut Vec<u32>) -> Result<(), Unroutable> {
        let route = self.fabric.route(from, to);
        let route = route.map_err(|error| Unroutable {
            from,
            to,
            reason: error.to_string(),
        })?;
        links.extend(route.into_iter().map(|channel| channel.0));
        Ok(())
    }
}
