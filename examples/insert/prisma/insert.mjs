// npm install @prisma/client @prisma/adapter-pg prisma; npx prisma generate --schema schema.prisma
// DATABASE_URL=postgres://... node insert.mjs
import { PrismaPg } from "@prisma/adapter-pg";
import client from "./generated/index.js";

const prisma = new client.PrismaClient({
  adapter: new PrismaPg({ connectionString: process.env.DATABASE_URL }),
});
try {
  const message = await prisma.$transaction(async (tx) => {
    await tx.order.update({ where: { id: 42 }, data: { state: "placed" } });
    return tx.outboxMessage.create({
      data: {
        tenantId: 7,
        aggregateType: "order",
        aggregateId: "42",
        eventType: "order.placed",
        payload: { total: 1250, currency: "EUR" },
      },
      select: { id: true },
    });
  });
  console.log(message.id.toString());
} finally {
  await prisma.$disconnect();
}
